"""Parts of a model: tensors that a policy selects by name instead of by kind."""

from collections.abc import Iterable, Mapping
from itertools import chain, pairwise

from torch import nn

from fl_lightning.batch_norm.kinds import KINDS, buffer_kinds, parameter_kinds
from fl_lightning.errors import ConfigurationError, nearest

LAST_LAYER = "last layer"
"""Name of the part that holds the last layer in ``named_modules`` with own trainable parameters."""


def match_parts(
    model: nn.Module, parts: Iterable[str], owner: str = "policy()"
) -> dict[str, tuple[str, ...]]:
    """Return the parts that contain each tensor of a model. The most specific part comes first.

    A part is the qualified name of a module, parameter or buffer, or :data:`LAST_LAYER`. A module
    contains the tensors of its submodules. The segment ``*`` matches any single segment, as in
    ``"layer1.*.conv1"``. A part with more segments is more specific. Among parts with equally many
    segments, the part with fewer ``*`` is more specific.

    Args:
        model: The model.
        parts: The parts.
        owner: Name of the setting with the parts, for error messages.

    Returns:
        The parts of each tensor, keyed by the tensor's name. Tensors in no part are omitted.

    Raises:
        ConfigurationError: A part is empty, two parts are equally specific for a tensor, or a part
            shares a tensor with a layer that is in no part.
    """
    paths = {part: _path(model, part) for part in parts}
    _refuse_shared(model, paths, owner)
    kinds = {**parameter_kinds(model), **buffer_kinds(model)} if paths else {}
    tensors = [name for name, kind in kinds.items() if kind != "scratch"]
    matches: dict[str, tuple[str, ...]] = {}
    for tensor in tensors:
        ranked = sorted((-len(p), p.count("*"), part) for part, p in paths.items() if _contains(p, tensor))
        for one, other in pairwise(ranked):
            if one[:2] == other[:2]:
                raise ConfigurationError(
                    f"{owner}: {one[2]!r} and {other[2]!r} both name {tensor!r}, and neither is more specific; name one of them in full"
                )
        if ranked:
            matches[tensor] = tuple(part for *_, part in ranked)
    matched = {part for ranked in matches.values() for part in ranked}
    for part in (part for part in paths if part not in matched):
        names = list(dict.fromkeys(tensor.rpartition(".")[0] or tensor for tensor in tensors))
        raise ConfigurationError(
            f"{owner}: {part!r} is no kind of state ({', '.join(KINDS)}) and no name in the model {type(model).__name__}"
            f"{nearest(part, [*KINDS, *names])}; names are {', '.join(names)}"
        )
    return matches


def _refuse_shared(model: nn.Module, paths: Mapping[str, list[str]], owner: str) -> None:
    names: dict[int, str] = {}
    shared = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    for name, tensor in chain(*shared) if paths else ():
        first = names.setdefault(id(tensor), name)
        inside = {x: [part for part, path in paths.items() if _contains(path, x)] for x in (first, name)}
        if bool(inside[first]) != bool(inside[name]):
            one, other = (first, name) if inside[first] else (name, first)
            raise ConfigurationError(
                f"{owner}: {inside[one][0]!r} contains {one!r}, which is the same tensor as {other!r}; name the layers of both, or "
                "give the layers separate tensors"
            )


def _path(model: nn.Module, part: str) -> list[str]:
    if part != LAST_LAYER:
        return part.split(".")
    trainable = (
        name for name, module in model.named_modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    )  # fmt: skip
    *_, last = "", *trainable
    return last.partition(".parametrizations")[0].split(".") if last else []


def _contains(path: list[str], tensor: str) -> bool:
    segments = tensor.split(".")
    return len(path) <= len(segments) and all(p in ("*", s) for p, s in zip(path, segments, strict=False))


def treatment(policy: Mapping[str, str], kind: str, parts: Iterable[str] = ()) -> str:
    """Return the treatment of a tensor under a policy.

    If several parts in the policy contain the tensor, the most specific part decides. If no part
    contains the tensor, the tensor's kind of state decides.

    Args:
        policy: Treatments by kind and part, from ``fl_lightning.round.policy.resolve_policy``.
        kind: The tensor's kind of state.
        parts: The parts that contain the tensor, the most specific first.
    """
    return "discarded" if kind == "scratch" else next(policy[key] for key in (*parts, kind) if key in policy)


def treatments(model: nn.Module, policy: Mapping[str, str]) -> dict[str, str]:
    """Return the treatment of each trainable parameter and buffer by name.

    Args:
        model: The model.
        policy: Treatments by kind and part, from ``fl_lightning.round.policy.resolve_policy``.

    Raises:
        ConfigurationError: A part is empty, or two parts are equally specific for a tensor.
    """
    parts = match_parts(model, [key for key in policy if key not in KINDS])
    kinds = {**parameter_kinds(model), **buffer_kinds(model)}
    return {tensor: treatment(policy, kind, parts.get(tensor, ())) for tensor, kind in kinds.items()}
