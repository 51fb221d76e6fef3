"""Games of the `textarena` package, tamed: seeded, apart from each other, without downloads or printing."""

from __future__ import annotations

import copy
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import Any

from taskmill.errors import TaskmillError, TasksetError
from taskmill.tasks.builtin._draws import Draws
from taskmill.tasks.builtin._shared import bundled_words, needed_package


class Game:
    """A game before it begins. Episodes begin from copies, so nothing ever happens to it."""

    def __init__(self, name: str, environment: Any) -> None:
        self.name = name
        self._environment = environment
        # Dictionaries of a hundred thousand words are looked into and never changed: copies share them.
        values = vars(_bare(environment)).values()
        self._shared = [value for value in values if type(value).__name__ == "EnglishDictionary"]

    def copy(self) -> Any:
        """The environment, to be played in."""
        return copy.deepcopy(self._environment, {id(value): value for value in self._shared})


class Episode:
    """A game under way, with a random state of its own: what happens elsewhere makes no difference to it."""

    def __init__(self, game: Game, seed: int) -> None:
        self._draws = Draws(seed)
        self._environment = game.copy()
        with self._draws:
            try:
                self._environment.reset(num_players=1, seed=seed)
            except Exception as error:
                raise TasksetError(_why_not(game.name, error)) from error
        self._state = _bare(self._environment).state
        if type(self._state).__name__ != "SinglePlayerState":
            raise TasksetError(f"the game {game.name!r} is none for a single player")
        self.opening = self._heard()
        """What the game says first: its rules, and mostly how things stand."""

    def play(self, move: str) -> str | None:
        """Make a move. Returns what the game says to it, `None` when it is over."""
        with self._draws:
            done, _ = self._environment.step(action=move)
        return None if done else self._heard()

    @property
    def reward(self) -> float:
        """What the game gave its player; 0 before it is over."""
        rewards = self._state.rewards or {}
        return float(rewards.get(0, 0.0))

    @property
    def reason(self) -> str:
        """Why the game ended, in its words."""
        return str(self._state.game_info[0].get("reason") or "")

    @property
    def facts(self) -> Mapping[str, Any]:
        """All that the game knows, its secrets too."""
        facts: Mapping[str, Any] = self._state.game_state
        return facts

    def _heard(self) -> str:
        """What was said since the last time, the player's own words not among it."""
        _, observations = _bare(self._environment).get_observation()
        # Some games put the player's own words where the kind should be.
        kinds = [getattr(kind, "name", "PLAYER_ACTION") for _, _, kind in observations]
        said = [
            str(text).strip()
            for kind, (_, text, _) in zip(kinds, observations, strict=True)
            if kind != "PLAYER_ACTION"
        ]
        return "\n\n".join(text for text in said if text)


def game_named(name: str, options: Mapping[str, Any]) -> Game:
    """A game of the package. Raises `TasksetError` when there is none of that name, or it can't be had here."""
    return _game(name, json.dumps(options, sort_keys=True))


def wordle_game(num_guesses: int) -> Game:
    """Wordle with the words that come along, in place of the package's own, which have to be downloaded."""
    with _ONCE:
        return _wordle(num_guesses)


def wordle_words() -> list[str]:
    """The words that may be the secret."""
    return bundled_words("wordle.txt")


# -- making them ----------------------------------------------------------------------------------------------

_ONCE = threading.Lock()


def _game(name: str, options: str) -> Game:
    with _ONCE:
        return _built(name, options)


@cache
def _built(name: str, options: str) -> Game:
    package = _package()
    registry: Mapping[str, Any] = package.envs.registration.ENV_REGISTRY
    if name not in registry:
        near = get_close_matches(name, registry, n=1) or get_close_matches(
            name.lower(), map(str.lower, registry), n=1
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TasksetError(f"taskset 'textarena': there is no game {name!r}{hint}")
    with Draws(0), _offline():
        try:
            game = Game(name, package.make(name, **json.loads(options)))
        except Exception as error:
            raise TasksetError(_why_not(name, error)) from error
    _silence()
    return game


@cache
def _wordle(num_guesses: int) -> Game:
    _package("wordle")
    with Draws(0), _offline():
        wordle = needed_package("textarena.envs.Wordle.env", "wordle", "games").WordleEnv
        dictionary = _dictionary()

        class Wordle(wordle):  # type: ignore[misc,valid-type]
            def __init__(self) -> None:
                self.word_length = 5
                self.num_guesses = num_guesses
                self.word_list = wordle_words()
                self.dictionary = dictionary

            def _check_word(self, word: str) -> bool:
                return word in self.word_list or bool(super()._check_word(word))

        environment = Wordle()
    _silence()
    return Game("Wordle", environment)


@cache
def _dictionary() -> Any:
    """The words that may be guessed: those of the package that need no download."""
    lists = needed_package("textarena.envs.utils.word_lists", "wordle", "games")
    return lists.EnglishDictionary(include_nltk=False)


@cache
def _package(taskset: str = "textarena") -> Any:
    with Draws(0):
        return needed_package("textarena", taskset, "games")


def _bare(environment: Any) -> Any:
    """The game itself, without what the package wraps around it to show it."""
    while "env" in vars(environment):
        environment = environment.env
    return environment


@contextmanager
def _offline() -> Iterator[None]:
    """The package downloads word lists when it is imported, without being asked. Inside here it does not."""
    nltk: Any = needed_package("nltk", "textarena", "games")
    download = nltk.download
    nltk.download = lambda *args, **kwargs: False
    try:
        yield
    finally:
        nltk.download = download


def _silence() -> None:
    """Some games print as they are made. Standard output belongs to the program."""
    for name, module in list(sys.modules.items()):
        if name.startswith("textarena.envs"):
            vars(module).setdefault("print", lambda *args, **kwargs: None)


def _why_not(name: str, error: Exception) -> str:
    """Why a game can't be played here, in words."""
    start = f"the game {name!r} can't be played here: "
    if isinstance(error, LookupError) and (found := re.search(r"nltk\.download\(['\"](\w+)", str(error))):
        hint = "; the taskset 'wordle' does without" if name.startswith("Wordle") else ""
        return (
            f"{start}it needs data of nltk that is not on this machine; "
            f"get it with: python -m nltk.downloader {found[1]} averaged_perceptron_tagger_eng{hint}"
        )
    if isinstance(error, AssertionError | ValueError) and "player" in str(error):
        return f"{start}it is none for a single player ({error})"
    if isinstance(error, TaskmillError):
        return f"{start}{error}"
    return f"{start}{type(error).__name__}: {error}"
