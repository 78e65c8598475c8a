"""The project's only YAML loader. It knows the line of each key. This module does not import PyTorch."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import yaml


class Lined(dict[Any, Any]):
    """A mapping in a YAML file.

    Attributes:
        lines: Line number of each key.
    """

    lines: Mapping[Any, int]


class _Loader(yaml.SafeLoader):
    """Safe loader that stores the line number of each key, and reads ``1e-3`` as a number.

    A duplicate key is an error, although PyYAML's own loaders accept duplicate keys; ``1`` and
    ``"1"`` are duplicates. A date is a text.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  # as in the base class
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":timestamp"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def lined(self, node: yaml.MappingNode) -> Iterator[Lined]:
        """Yield an empty dict, and fill it later, because a mapping in YAML may contain itself."""
        mapping = Lined()
        yield mapping
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key)
            if str(name) in map(str, lines):
                problem = f"{key.value!r} is given twice; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
        mapping.update(self.construct_mapping(node))
        mapping.lines = lines


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.lined)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?=[0-9.]*[.eE])(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


@lru_cache(64)
def read_yaml(text: str) -> Any:
    """Return the value of a YAML text, whose mappings are :class:`Lined`. Do not modify the value.

    Raises:
        yaml.YAMLError: The text is not YAML, or a key is given twice.
        ValueError: A number is too long.
    """
    return yaml.load(text, _Loader)  # the loader is a SafeLoader: a file cannot run code


def plain_yaml(text: str) -> Any:
    """Return the value of a YAML text as a new object of dicts and lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return plain(read_yaml(text))


def reason(error: Exception) -> str:
    """Return why a text is not YAML, such as ``line 3: found a tab``."""
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else " ".join(str(error).split())
