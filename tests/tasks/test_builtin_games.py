"""Games and generators of other packages: seeded, apart from each other, offline."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from taskmill.errors import ConfigurationError, TasksetError
from taskmill.models.base import Completion, Request
from taskmill.records import Message, Trace
from taskmill.tasks.builtin import _games
from taskmill.tasks.builtin import textarena as games
from taskmill.tasks.builtin._draws import Draws
from taskmill.tasks.builtin._games import Episode, game_named, wordle_words
from taskmill.tasks.builtin.reasoning_gym import BY_HASH, ReasoningGymTask, ReasoningGymTaskset
from taskmill.tasks.builtin.textarena import TextArenaTask, TextArenaTaskset, WordleTaskset
from tests.tasks.reference import answered, rolled, said, solved, untouched

# -- a random state of one's own ------------------------------------------------------------------------------


def test_draws_go_on_where_they_ended_whoever_drew_in_between() -> None:
    numpy = pytest.importorskip("numpy")

    def some() -> list[float]:
        return [random.random(), numpy.random.random()]

    one, other = Draws(1), Draws(2)
    alone = []
    with Draws(1):
        alone += [*some(), *some()]
    random.seed(9)
    numpy.random.seed(9)
    outside = some()
    random.seed(9)
    numpy.random.seed(9)
    together = []
    with one:
        together += some()
    with other:
        some()
    assert some() == outside
    with one:
        together += some()
    assert together == alone


def test_what_is_raised_inside_leaves_the_state_and_the_lock_as_they_were() -> None:
    random.seed(9)
    before = random.getstate()

    def fail() -> None:
        with Draws(1):
            random.random()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert random.getstate() == before
    with Draws(1):
        pass


# -- games ----------------------------------------------------------------------------------------------------


@pytest.fixture
def textarena() -> Any:
    return pytest.importorskip("textarena", reason="the extra 'games' is not installed")


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of the episodes that were begun."""
    begun: list[int] = []

    class Counted(Episode):
        def __init__(self, game: Any, seed: int) -> None:
            begun.append(seed)
            super().__init__(game, seed)

    monkeypatch.setattr(games, "Episode", Counted)
    return begun


def test_an_opening_that_does_not_depend_on_the_seed_is_asked_for_once(
    textarena: Any, seeds: list[int]
) -> None:
    tasks = TextArenaTaskset(seed=10).select(500)
    assert seeds == list(range(10, 18))
    assert len({task.data.prompt for task in tasks}) == 1
    assert [task.data.seed for task in tasks] == list(range(10, 510))


def test_an_opening_that_depends_on_the_seed_is_asked_for_with_its_task(
    textarena: Any, seeds: list[int]
) -> None:
    tasks = TextArenaTaskset(game="2048-v0").select(5)
    assert max(seeds) == 4
    assert len({task.data.prompt for task in tasks}) == 5


class Wanderer:
    """Says one move after another, each from a list, chosen by the number of the rollout and of the turn."""

    name = "wanderer"

    def __init__(self, moves: Sequence[str], number: int) -> None:
        self._draws = Random(number)
        self._moves = moves

    async def complete(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        return Completion(Message("assistant", self._draws.choice(self._moves)), model=self.name, cost=0.0)

    async def close(self) -> None:
        pass


PLAYED = [
    # Mines are laid at the first move, cards and tiles are drawn at every move.
    ("Minesweeper-v0-small", [f"[{row} {column}]" for row in range(5) for column in range(5)]),
    ("Blackjack-v0", ["[Hit]", "[Stand]", "[hit]"]),
    ("2048-v0-3x3", ["[up]", "[down]", "[left]", "[right]"]),
]


@pytest.mark.parametrize(("game", "moves"), PLAYED, ids=[game for game, _ in PLAYED])
async def test_fifty_games_at_once_are_fifty_in_a_row(textarena: Any, game: str, moves: list[str]) -> None:
    tasks = TextArenaTaskset(game=game).select(50)

    async def play(number: int) -> Trace:
        return await rolled(tasks[number], Wanderer(moves, number))

    in_a_row = [await play(number) for number in range(50)]
    at_once = await asyncio.gather(*(play(number) for number in range(50)))
    assert [told(trace) for trace in at_once] == [told(trace) for trace in in_a_row]
    assert all(not trace.errors for trace in at_once)
    assert len({str(told(trace)) for trace in at_once}) > 10
    assert sum(len(trace.messages) for trace in at_once) > 4 * 50


def told(trace: Trace) -> tuple[Any, ...]:
    return [turn.content for turn in trace.messages], trace.reward, trace.metrics, trace.task_state


async def test_nothing_of_a_live_game_is_stored(textarena: Any) -> None:
    (task,) = TextArenaTaskset().select(1)
    trace = await solved(task)
    assert trace.task_state == {
        "moves": 1,
        "finished": True,
        "game_reward": 1.0,
        "reason": "Congratulations! You guessed the correct number.",
    }


async def test_a_game_that_is_not_played_to_its_end_has_no_reward(textarena: Any) -> None:
    (task,) = TextArenaTaskset().select(1)
    rolls = await answered(task, ["[1]"])
    assert rolls.state == "failed"  # the script has no second answer, so the game is never over
    assert task.score({"game_reward": 0.0}) == 0.0


async def test_the_model_hears_only_what_is_new(textarena: Any) -> None:
    (task,) = TextArenaTaskset(seed=1).select(1)
    secret = int((await solved(task)).messages[-1].content.strip("[]"))
    wrong = [number for number in range(1, 21) if number != secret][:2]
    trace = await answered(task, [f"I say [{wrong[0]}]", f"[{wrong[1]}]", f"[{secret}]"])
    heard = [turn.content for turn in trace.messages if turn.role == "user"]
    hints = [f"The target number is {'higher' if number < secret else 'lower'}." for number in wrong]
    assert heard == [task.data.prompt, *hints]
    assert trace.reward == 1.0
    assert trace.metrics == {"moves": 3.0, "finished": 1.0}


async def test_mastermind_has_a_reference_solution_too(textarena: Any) -> None:
    for task in TextArenaTaskset(game="Mastermind-v0").select(3):
        assert (await solved(task)).reward == 1.0
        nothing = await untouched(task)
        assert nothing.reward is not None
        assert nothing.reward < 1.0


def test_games_without_a_known_way_to_win_have_no_reference_solution(textarena: Any) -> None:
    (task,) = TextArenaTaskset(game="2048-v0").select(1)
    assert type(task) is TextArenaTask
    assert task.solve is None


async def test_an_opening_other_than_the_prompt_is_an_error(textarena: Any) -> None:
    (task,) = TextArenaTaskset().select(1)
    other = TextArenaTask(task.data.model_copy(update={"prompt": "Guess!"}))
    trace = await answered(other, ["[1]"])
    assert trace.state == "failed"
    assert "begins otherwise than its prompt says" in trace.errors[0].message


def test_options_reach_the_game(textarena: Any) -> None:
    (task,) = TextArenaTaskset(options={"max_number": 77}).select(1)
    assert "between 1 and 77" in str(task.data.prompt)
    with pytest.raises(TasksetError, match="can't be played here: TypeError"):
        TextArenaTaskset(options={"colour": "red"}).select(1)


@pytest.mark.parametrize(
    ("game", "why"),
    [
        ("GuesTheNumber-v0", "there is no game 'GuesTheNumber-v0'; did you mean 'GuessTheNumber-v0'?"),
        ("ConnectFour-v0", "it is none for a single player"),
        ("PublicGoodsGame-v0", "is none for a single player"),
    ],
)
def test_games_that_can_not_be_played(textarena: Any, game: str, why: str) -> None:
    with pytest.raises(TasksetError) as raised:
        TextArenaTaskset(game=game).select(1)
    assert why in str(raised.value)


def test_a_game_without_its_data_says_how_to_get_it(textarena: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    def download(*what: Any, **how: Any) -> bool:
        raise AssertionError("nothing is downloaded unasked")

    monkeypatch.setattr(nltk, "download", download)
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(TasksetError, match=r"data of nltk .* python -m nltk\.downloader words"):
        TextArenaTaskset(game="WordSearch-v0").select(1)
    assert nltk.download is download


def test_games_do_not_print(textarena: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(TextArenaTaskset(game="RushHour-v0").select(2)) == 2
    assert capfd.readouterr().out == ""


def test_a_game_is_made_once_however_many_threads_ask(
    textarena: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _games._built.cache_clear()
    made = []
    make = textarena.make
    monkeypatch.setattr(textarena, "make", lambda *what, **how: made.append(what) or make(*what, **how))
    threads = [threading.Thread(target=game_named, args=("Bandit-v0", {})) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


# -- wordle ---------------------------------------------------------------------------------------------------


@pytest.fixture
def wordle(textarena: Any) -> Iterator[type[WordleTaskset]]:
    return WordleTaskset  # type: ignore[return-value]


def test_the_words_of_wordle() -> None:
    words = wordle_words()
    assert len(words) == len(set(words)) > 500
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in words)


async def test_wordle_is_won_by_the_word_alone(wordle: Any) -> None:
    (task,) = wordle(num_guesses=2).select(1)
    secret = (await solved(task)).task_state["secret_word"]
    wrong = [word for word in ("crane", "pilot", "house", "bread") if word != secret]
    lost = await answered(task, [f"[{wrong[0]}]", f"Then [{wrong[1]}]."])
    assert lost.reward == 0.0
    assert 0.0 <= lost.metrics["partial_credit"] < 1.0
    assert lost.task_state["guesses"] == wrong[:2]
    won = await answered(task, [f"[{wrong[0]}]", f"[{secret.upper()}]"])
    assert (won.reward, won.metrics["moves"], won.metrics["partial_credit"]) == (1.0, 2.0, 1.0)
    assert won.task_state["solved"] is True


async def test_wordle_takes_words_and_refuses_others(wordle: Any) -> None:
    (task,) = wordle().select(1)
    trace = await answered(task, ["[zzzzz]", "[crane]", "[cranes]", "[pilot]", "[no]", "no guess"])
    heard = [turn.content for turn in trace.messages if turn.role == "user"]
    assert "'zzzzz' is not an English word" in heard[1]
    assert "C R A N E" in heard[2]
    assert "exactly 5 letters" in heard[3]
    assert trace.task_state["guesses"] == ["crane", "pilot"]
    assert trace.reward == 0.0


async def test_each_seed_has_its_word(wordle: Any) -> None:
    words = [(await solved(task)).task_state["secret_word"] for task in wordle().select(12)]
    again = [(await solved(task)).task_state["secret_word"] for task in wordle(seed=6).select(6)]
    assert len(set(words)) > 8
    assert words[6:] == again
    assert set(words) <= set(wordle_words())


# -- reasoning_gym --------------------------------------------------------------------------------------------


@pytest.fixture
def gym() -> type[ReasoningGymTaskset]:
    pytest.importorskip("reasoning_gym", reason="the extra 'games' is not installed")
    return ReasoningGymTaskset


def test_the_tasks_are_the_generators_own(gym: Any) -> None:
    import reasoning_gym

    (task,) = gym(seed=3, parameters={"min_terms": 4, "max_terms": 4}).select(1)
    entry = reasoning_gym.create_dataset("chain_sum", seed=3, size=1, min_terms=4, max_terms=4)[0]
    assert (task.data.prompt, task.data.answer) == (entry["question"], entry["answer"])
    assert [one.data.prompt for one in gym(seed=3).select(4)][2] == gym(seed=5).select(1)[0].data.prompt


def test_answers_are_scored_by_the_generators_scorer(gym: Any) -> None:
    (task,) = gym(generator="countdown").select(1)
    best = task.score(said(f"It works out: <answer>{task.data.answer}</answer>"))
    assert best == 1.0
    assert 0.0 < task.score(said("<answer>1 + 1</answer>")) < 1.0  # this scorer gives a little for trying
    assert task.score(said(str(task.data.answer))) == 0.0
    assert task.score(said()) == 0.0


async def test_a_generator_without_answers_has_no_reference_solution(gym: Any) -> None:
    (task,) = gym(generator="graph_color").select(1)
    assert type(task) is ReasoningGymTask
    assert task.solve is None
    assert (await untouched(task)).reward == 0.0


def test_a_generator_that_seeds_numpy_changes_nothing(gym: Any) -> None:
    import numpy

    numpy.random.seed(4)
    before = numpy.random.get_state()[1].tolist()
    (task,) = gym(generator="pool_matrix").select(1)
    assert task.score(said(f"<answer>{task.data.answer}</answer>")) == 1.0
    assert numpy.random.get_state()[1].tolist() == before


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"generator": "chain_sums"}, "there is no generator 'chain_sums'; did you mean 'chain_sum'?"),
        (
            {"parameters": {"min_term": 3}},
            "'chain_sum' has no parameter 'min_term'; did you mean 'min_terms'?",
        ),
        ({"parameters": {"min_terms": 9}}, "does not take {'min_terms': 9}: max_terms must be >= min_terms"),
    ],
)
def test_what_can_not_be_meant_is_said(gym: Any, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(TasksetError) as raised:
        gym(**fields).select(1)
    assert why in str(raised.value)


def test_the_seed_is_no_parameter() -> None:
    with pytest.raises(ConfigurationError, match="each task has a seed of its own"):
        ReasoningGymTaskset(parameters={"seed": 3})


def test_generators_that_differ_between_processes_are_refused(
    gym: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sys.flags.hash_randomization:
        pytest.skip("this process has no random hashes")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for generator in BY_HASH:
        with pytest.raises(TasksetError, match="PYTHONHASHSEED is set to a number"):
            gym(generator=generator).select(1)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert gym(generator="ransom_note").select(1)[0].data.prompt


def test_a_task_that_its_seed_does_not_make_any_more_is_an_error(gym: Any) -> None:
    (task,) = gym().select(1)
    old = ReasoningGymTask(task.data.model_copy(update={"prompt": "2 + 2 ="}))
    with pytest.raises(Exception, match="does not make the same task from seed 0 any more"):
        old.score(said("<answer>4</answer>"))
