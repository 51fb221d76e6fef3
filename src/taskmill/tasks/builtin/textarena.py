"""`textarena` and `wordle`: games for one player of the `textarena` package, one seeded episode for each task."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

from pydantic import Field

from taskmill.errors import TaskError
from taskmill.records import Message
from taskmill.tasks.builtin._games import Episode, Game, game_named, wordle_game
from taskmill.tasks.scoring import metric, reward
from taskmill.tasks.task import Task, TaskData
from taskmill.tasks.taskset import Taskset, TasksetConfig

_SEEDS_TRIED = 8
"""Openings that are compared before they are taken to be the same for all seeds."""

_GAME = "_game"  # What starts with an underscore is not stored with the rollout.


class TextArenaConfig(TasksetConfig):
    """Which game, and its options."""

    game: str = "GuessTheNumber-v0"
    """The name by which the package knows it. It must be one for a single player."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The game's own, such as the size of its board."""
    seed: int = Field(0, ge=0)


class WordleConfig(TasksetConfig):
    """How many guesses there are."""

    num_guesses: int = Field(6, ge=1)
    seed: int = Field(0, ge=0)


class TextArenaData(TaskData):
    """An episode: the game, its options, its seed."""

    game: str
    options: dict[str, Any] = Field(default_factory=dict)
    seed: int


class TextArenaTask(Task[TextArenaData]):
    """A game. What the model says is its move, what the game says to that is the next turn of the user.

    Reward: what the game gives its player, which is mostly a number from 0 to 1; 0 for a game that did not come to
    its end.
    """

    def game(self) -> Game:
        """The game before it begins."""
        return game_named(self.data.game, self.data.options)

    def setup(self, state: dict[str, Any]) -> None:
        episode = Episode(self.game(), self.data.seed)
        if episode.opening != self.data.prompt:
            raise TaskError(
                f"{self.data.game!r} with seed {self.data.seed} begins otherwise than its prompt says: "
                f"{episode.opening!r:.300}"
            )
        state[_GAME] = episode
        state.update(moves=0, finished=False, game_reward=0.0, reason="")

    def user(self, state: dict[str, Any], messages: Sequence[Message]) -> str | None:
        episode: Episode = state[_GAME]
        said = episode.play(messages[-1].content)
        state["moves"] += 1
        if said is not None:
            return said
        state.update(finished=True, game_reward=episode.reward, reason=episode.reason)
        return None

    @reward
    def score(self, state: dict[str, Any]) -> float:
        return float(state["game_reward"])

    @metric
    def play(self, state: dict[str, Any]) -> dict[str, float]:
        return {"moves": float(state["moves"]), "finished": float(state["finished"])}


def _guess_the_number(episode: Episode) -> str:
    return f"[{episode.facts['game_number']}]"


def _mastermind(episode: Episode) -> str:
    return f"[{' '.join(map(str, episode.facts['secret_code']))}]"


SOLUTIONS: Mapping[str, Callable[[Episode], str]] = {
    "GuessTheNumber": _guess_the_number,
    "Mastermind": _mastermind,
}
"""Games whose first move can win, for one who may look at the secret."""


class SolvedTextArenaTask(TextArenaTask):
    """A game whose winning move is known."""

    def solve(self, state: dict[str, Any]) -> str:
        return SOLUTIONS[_family(self.data.game)](state[_GAME])


class WordleTask(TextArenaTask):
    """Wordle. Reward: 1 for the word, else 0; how near the last guess came is a metric."""

    def game(self) -> Game:
        return wordle_game(self.data.options["num_guesses"])

    def setup(self, state: dict[str, Any]) -> None:
        super().setup(state)
        state.update(secret_word=state[_GAME].facts["secret_word"], solved=False)

    def user(self, state: dict[str, Any], messages: Sequence[Message]) -> str | None:
        said = super().user(state, messages)
        guesses = state[_GAME].facts["guess_history"]
        state["guesses"] = [word for word, _ in guesses]
        state["solved"] = state["secret_word"] in state["guesses"]
        return said

    def solve(self, state: dict[str, Any]) -> str:
        return f"[{state['secret_word']}]"

    @reward
    def score(self, state: dict[str, Any]) -> float:
        return float(state["solved"])

    @metric
    def partial_credit(self, state: dict[str, Any]) -> float:
        """Letters of the last guess in their place, and half of those in another, as a part of all."""
        return float(state["game_reward"])


class _Episodes(Taskset[TextArenaTask]):
    """A game's episodes without end, the seed of each one above that of the one before."""

    INFINITE: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("textarena",)

    def _load(self, kind: type[TextArenaTask], first: TextArenaData) -> Iterator[TextArenaTask]:
        def opening(seed: int) -> str:
            return Episode(kind(first).game(), seed).opening

        openings = (opening(first.seed + place) for place in range(_SEEDS_TRIED))
        shared = next(openings)
        same = all(other == shared for other in openings)
        for idx in itertools.count():
            seed = first.seed + idx
            prompt = shared if same else opening(seed)
            data = first.model_copy(update={"idx": idx, "seed": seed, "prompt": prompt})
            yield kind(data, self.config.task)


class TextArenaTaskset(_Episodes):
    """Games for one player of the package textarena, another episode for each task."""

    name: ClassVar[str] = "textarena"
    Config: ClassVar[type[TasksetConfig]] = TextArenaConfig

    def load(self) -> Iterator[TextArenaTask]:
        config = cast("TextArenaConfig", self.config)
        kind = SolvedTextArenaTask if _family(config.game) in SOLUTIONS else TextArenaTask
        return self._load(
            kind, TextArenaData(idx=0, game=config.game, options=config.options, seed=config.seed)
        )


class WordleTaskset(_Episodes):
    """Guess the word, with marks for letters that are right; it needs no data from elsewhere."""

    Config: ClassVar[type[TasksetConfig]] = WordleConfig

    def load(self) -> Iterator[TextArenaTask]:
        config = cast("WordleConfig", self.config)
        options = {"num_guesses": config.num_guesses}
        return self._load(WordleTask, TextArenaData(idx=0, game="Wordle", options=options, seed=config.seed))


def _family(game: str) -> str:
    """The name of a game without version and variant."""
    return game.partition("-")[0]
