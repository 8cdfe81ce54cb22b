"""Which trainer gets the monitor, and when."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from trainmon.config import ConfigError
from trainmon.launch.hosts import Host
from trainmon.launch.trainers import Trainers

MODULE = '''
class BaseTrainer:
    fails = False

    def __init__(self, ready=True):
        self.ready = ready

    def train(self):
        return self.work()

    def work(self):
        """What it does."""
        if self.fails:
            raise ValueError("in training")
        return "trained"


class TextTrainer:
    def __init_subclass__(cls, mark=None, **keywords):
        cls.mark = mark

    def __init__(self, *arguments, **keywords):
        """Builds one."""
        self.base = BaseTrainer(*arguments, **keywords)

    def train(self):
        return self.base.train()


class Sealed:
    pass
'''


class Adapter:
    """Notes what is attached, refuses what is not set up."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.error: Exception | None = None

    def __call__(self, trainer: Any, config: Any) -> Any:
        assert config == "c.yaml"
        if self.error is not None:
            raise self.error
        if not getattr(trainer, "base", trainer).ready:
            raise TypeError("not set up")
        self.seen.append(type(trainer).__name__)
        return self

    def detach(self) -> None:
        self.seen.append("detached")


class World:
    def __init__(self, package: str) -> None:
        self.adapter, self.said = Adapter(), list[str]()
        sys.modules[f"{package}_adapter"] = type(sys)(f"{package}_adapter")
        sys.modules[f"{package}_adapter"].attach = self.adapter  # type: ignore[attr-defined]
        names = ("BaseTrainer", "TextTrainer", "Sealed")
        host = Host("Host", package, names, "base", (f"{package}_adapter", "attach"))
        self.trainers = Trainers([host], "c.yaml", self.said.append, self.refuse)

    def refuse(self, error: ConfigError) -> NoReturn:
        raise SystemExit(2)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    package = tmp_path / "some_host"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "trainer.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    world = World("some_host")
    world.trainers.install()
    yield world
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("some_host")]:
        del sys.modules[name]


def host() -> Any:
    import some_host.trainer  # type: ignore[import-not-found]

    return some_host.trainer


def test_the_outer_one_of_two(world: World) -> None:
    trainer = host().TextTrainer()
    assert world.adapter.seen == ["TextTrainer"] and trainer.train() == "trained"
    assert trainer.base.train() == "trained" and world.adapter.seen == ["TextTrainer"]


def test_a_trainer_without_another_around_it(world: World) -> None:
    host().BaseTrainer().train()
    assert world.adapter.seen == ["BaseTrainer"] and world.trainers.attached == 1


def test_classes_derived_from_it_when_their_own_constructor_is_through(world: World) -> None:
    module = host()
    order = world.adapter.seen

    class Mine(module.TextTrainer, mark=3):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            order.append("own")

    class Yours(Mine):
        pass

    assert Mine.mark == 3 and Yours.mark is None
    Yours()
    assert order == ["own", "Yours"]


def test_one_that_is_set_up_later_gets_it_when_it_trains(world: World) -> None:
    trainer = host().TextTrainer(ready=False)
    assert world.adapter.seen == [] and "not set up" in str(world.trainers.failed)
    trainer.base.ready = True
    trainer.train()
    assert world.adapter.seen == ["TextTrainer"] and world.trainers.failed is None


def test_one_that_cant_be_attached_to_does_not_train(world: World) -> None:
    trainer = host().TextTrainer(ready=False)
    with pytest.raises(TypeError, match="not set up"):
        trainer.train()


def test_a_configuration_that_asks_in_vain_ends_the_program(world: World) -> None:
    world.adapter.error = ConfigError([])
    with pytest.raises(SystemExit):
        host().TextTrainer()


def test_one_after_the_other(world: World) -> None:
    first, second = host().TextTrainer(), host().TextTrainer()
    assert world.adapter.seen == ["TextTrainer"]
    first.train()
    second.train()
    assert world.adapter.seen == ["TextTrainer", "detached", "TextTrainer"]
    host().BaseTrainer()
    assert world.adapter.seen[3:] == ["detached", "BaseTrainer"]


def test_it_goes_to_the_one_that_trains_first(world: World) -> None:
    first, second = host().TextTrainer(), host().BaseTrainer()
    second.train()
    first.train()
    assert world.adapter.seen == ["TextTrainer", "detached", "BaseTrainer", "detached", "TextTrainer"]


def test_one_that_was_thrown_away_is_no_hindrance(world: World) -> None:
    host().TextTrainer()
    gc.collect()
    host().BaseTrainer()
    assert world.adapter.seen == ["TextTrainer", "detached", "BaseTrainer"]


def test_training_inside_training_goes_without(world: World) -> None:
    module = host()
    inner: list[Any] = []

    class Outer(module.TextTrainer):  # type: ignore[misc]
        def train(self) -> str:
            import threading

            thread = threading.Thread(target=inner[0].train)
            thread.start()
            thread.join()
            return str(super().train())

    outer = Outer()
    inner.append(module.BaseTrainer())
    assert outer.train() == "trained"
    assert world.adapter.seen == ["Outer"] and "BaseTrainer, trains inside the first" in world.said[0]


def test_after_an_error_in_training_the_next_one_gets_it(world: World) -> None:
    trainer = host().TextTrainer()
    trainer.base.fails = True
    with pytest.raises(ValueError, match="in training"):
        trainer.train()
    host().TextTrainer()
    assert world.adapter.seen == ["TextTrainer", "detached", "TextTrainer"]


def test_a_constructor_that_raises_builds_nothing(world: World) -> None:
    with pytest.raises(TypeError):
        host().TextTrainer(1, 2, 3)
    assert world.adapter.seen == []
    host().TextTrainer()
    assert world.adapter.seen == ["TextTrainer"]


def test_the_classes_look_as_before(world: World) -> None:
    import inspect
    from importlib.machinery import SourceFileLoader

    module = host()
    assert isinstance(module.__loader__, SourceFileLoader) and module.__spec__.loader is module.__loader__
    assert inspect.getsource(module) == MODULE
    assert module.TextTrainer.__init__.__doc__ == "Builds one."
    assert str(inspect.signature(module.BaseTrainer)) == "(ready=True)"
    assert module.Sealed.__init__ is object.__init__


def test_modules_that_are_there_already(world: World) -> None:
    before = list(sys.meta_path)
    sys.meta_path.pop(0)
    sys.modules["some_host.blocked"] = None  # type: ignore[assignment]
    module = host()
    sys.meta_path[:] = before[1:]
    world.trainers.install()
    module.TextTrainer()
    assert world.adapter.seen == ["TextTrainer"]


def test_modules_of_others_are_left_alone(world: World, tmp_path: Path) -> None:
    (tmp_path / "some_hostess.py").write_text(MODULE)
    import some_hostess  # type: ignore[import-not-found]

    some_hostess.TextTrainer()
    assert world.adapter.seen == []
    with pytest.raises(ModuleNotFoundError):
        import some_host.none  # type: ignore[import-not-found]  # noqa: F401
