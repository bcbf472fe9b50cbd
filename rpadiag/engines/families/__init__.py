"""Site maps, one file per model family, each with the same parts in the same order for both stacks."""

from __future__ import annotations

from collections.abc import Iterable

from rpadiag.engines.families import gemma2, gemma3, llama, mistral, qwen2, qwen3, qwen3_moe
from rpadiag.engines.families.sitemap import Family, Source
from rpadiag.errors import InputError

FAMILIES: dict[str, Family] = {
    f.FAMILY.name: f.FAMILY for f in (llama, qwen2, qwen3, mistral, qwen3_moe, gemma2, gemma3)
}


def architectures() -> tuple[str, ...]:
    """Architecture names that rpadiag has a site map for."""
    return tuple(a for f in FAMILIES.values() for a in f.architectures)


def family_for(names: str | Iterable[str] | None) -> Family:
    """The family of the first known name in a configuration's ``architectures``; else InputError listing the known."""
    given = [names] if isinstance(names, str) else list(names or ())
    for family in FAMILIES.values():
        if set(given) & set(family.architectures):
            return family
    shown = ", ".join(given) or "none named in config.json"
    raise InputError(
        f"unsupported architecture: {shown}",
        detail=f"supported architectures: {', '.join(architectures())}",
        hint="a new family needs a site map: one file in rpadiag/engines/families",
    )


__all__ = ["FAMILIES", "Family", "Source", "architectures", "family_for"]
