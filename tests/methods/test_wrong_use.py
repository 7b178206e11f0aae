"""A codec, method or payload in the wrong place is one sentence, where the mistake is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import fedveil as fv
from fedveil.core import message
from fedveil.core.forecast import Turn
from fedveil.core.message import Answer, Question, Weights
from fedveil.runs.cost import cost
from toys import linear_task


def test_codecs_go_by_name() -> None:
    assert fv.FedAvg(up="qsgd", down="half") == fv.FedAvg(up=fv.Qsgd(), down=fv.Half())  # type: ignore[arg-type]
    assert fv.Scaffold(up="top-k").up == fv.TopK()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"method.down is 'qsdg', which is no codec; did you mean 'qsgd'\?"):
        fv.FedAvg(down="qsdg")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (fv.FedAvg(), "method.up is a FedAvg; it takes a codec"),
        (fv.Qsgd, "method.up is the class Qsgd; it takes a codec, such as Qsgd()"),
        (4, "method.up is a int; it takes a codec"),
        (None, "method.up is a NoneType; it takes a codec"),
    ],
)
def test_what_is_no_codec_is_told_when_the_method_is_made(given: Any, sentence: str) -> None:
    with pytest.raises(TypeError) as found:
        fv.FedAvg(up=given)
    assert str(found.value).startswith(sentence)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (fv.Qsgd(), r"Qsgd is no method, such as FedAvg\(\); codecs go into a method, as in FedAvg\(up=Qsgd\(\)\)"),
        (fv.FedAvg, r"FedAvg is a class; give an instance of it, FedAvg\(\)"),
        ("fedavg", r"str is no method, such as FedAvg\(\)$"),
    ],
)
def test_what_is_no_method_is_told_by_run(given: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        fv.run(linear_task(), given, rounds=1)


@pytest.mark.parametrize("option", ["step", "trainer", "handlers"])
def test_an_option_must_not_hide_a_function_of_the_method(option: str) -> None:
    with pytest.raises(TypeError, match=f"Mine.{option} is an option with the name of a function; rename it"):
        type("Mine", (fv.Averaging,), {"__annotations__": {option: float}, option: 0.1})


@message.kind
class Uncounted(Answer, frozen=True):
    update: Weights


@message.kind
class Unsummed(Answer, frozen=True):
    additive: ClassVar[bool] = True
    step: Weights
    records: int = 1


class Unlisted(Answer, frozen=True):
    update: Weights
    records: int = 1


def made(payload: Any, space: bool = False) -> fv.Codec:
    @dataclass(frozen=True)
    class Mine(fv.Codec):
        in_code_space: ClassVar[bool] = space

    if payload:
        Mine.payload = payload
    return Mine()


@pytest.mark.parametrize(
    ("codec", "sentence"),
    [
        (made(None), "Mine states no payload; set `payload` to the class of what `encode` returns"),
        (made(Unlisted), "Mine.payload is Unlisted, which is not registered; put @message.kind above it"),
        (made(Uncounted), "Mine.payload is Uncounted, which has no field `records`, by which updates are weighted"),
        (made(Unsummed), "Mine.payload is Unsummed, which is additive and has no field `update`"),
        (made(Uncounted, space=True), "Mine is in code space and states no offer"),
    ],
)
def test_a_payload_that_does_not_fit_is_told_with_its_class(codec: fv.Codec, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fv.FedAvg(up=codec)


@dataclass(frozen=True)
class Silent(fv.FedAvg):
    def forecast_messages(self, task: fv.Task, turn: Turn) -> list[Question]:
        return []


@dataclass(frozen=True)
class Free(fv.FedAvg):
    def forecast_compute(self, turn: Turn) -> Any:
        return fv.core.forecast.Compute()


def test_a_forecast_of_nothing_is_told() -> None:
    with pytest.raises(ValueError, match="fedavg forecasts no message; override forecast_messages in Silent"):
        cost(linear_task(), fv.Recipe(rounds=1, method=Silent()))
    notes = cost(linear_task(), fv.Recipe(rounds=1, method=Free()))["notes"]
    assert "fedavg forecasts no passes; if it trains, override its forecast_compute." in notes
