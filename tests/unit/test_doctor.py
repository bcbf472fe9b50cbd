"""What doctor says about this environment is true."""

from __future__ import annotations

import importlib.metadata

from rpadiag.sites import POINTS, REDUCED
from rpadiag.workflows import doctor


def test_compiled_sites_are_those_that_the_engine_can_capture() -> None:
    from rpadiag.engines import vllm_points

    assert doctor.COMPILED_POINTS == vllm_points.COMPILED_POINTS


def test_versions_are_the_installed_ones() -> None:
    found = {p.name: p.version for p in doctor.diagnose().packages}
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["liger-kernel"] is None or found["liger-kernel"] == importlib.metadata.version("liger-kernel")


def test_everything_works_here_or_says_how_to_get_it() -> None:
    found = {a.name: a for a in doctor.diagnose().abilities}
    assert found["trainer stack"].usable and found["rollout stack (emulated)"].usable
    for ability in found.values():
        assert ability.reason and not (ability.usable and ability.install)


def test_sites_cover_the_vocabulary_in_execution_order() -> None:
    sites = doctor.diagnose().sites
    assert set(sites["trainer"]) == set(POINTS) - set(REDUCED)
    assert sites["trainer"][0] == "embed" and sites["trainer"][-1] == "logprob"
