"""Errors carry what happened, why and what to do, and an exit code."""

from __future__ import annotations

import pytest

from rpadiag import errors
from rpadiag.errors import RpadiagError, UsageError, unknown_name


def test_text_of_an_error_is_message_detail_and_hint_on_their_own_lines() -> None:
    error = RpadiagError("site x never fired", detail="63 of 64 fired", hint="rerun with --mode eager")
    assert str(error) == "site x never fired\n63 of 64 fired\nhint: rerun with --mode eager"


def test_detail_and_hint_are_left_out_when_absent() -> None:
    assert str(RpadiagError("gone")) == "gone"


@pytest.mark.parametrize(
    "kind",
    [
        errors.UsageError,
        errors.InputError,
        errors.MissingDependencyError,
        errors.NotComparableError,
        errors.CaptureError,
        errors.EngineError,
    ],
)
def test_every_expected_error_means_that_the_question_cannot_be_answered(kind: type[RpadiagError]) -> None:
    assert kind("x").exit_code == errors.EXIT_UNANSWERABLE == 2


def test_exit_codes_are_those_of_the_design() -> None:
    assert (errors.EXIT_OK, errors.EXIT_GATE_FAILED, errors.EXIT_UNANSWERABLE, errors.EXIT_BUG) == (0, 1, 2, 3)


def test_unknown_name_lists_the_known_ones_and_proposes_the_nearest() -> None:
    error = unknown_name("region", "rop", ["rope", "swiglu"])
    assert isinstance(error, UsageError)
    assert str(error) == "unknown region: rop\nknown regions: rope, swiglu\nhint: did you mean rope?"


def test_unknown_name_far_from_all_proposes_none() -> None:
    assert unknown_name("region", "zzz", ["rope", "swiglu"]).hint == "use one of the known regions"
