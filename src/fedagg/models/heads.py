"""Where a model's body ends and its head begins, for algorithms that treat the two differently."""

from __future__ import annotations

from torch import nn

from fedagg.errors import SettingError, unknown


def head(model: nn.Module, name: str | None = None) -> str:
    """Dotted name of the head: the module called `name`, or else the last one that owns parameters itself.

    A named head may be a container, so that several layers can make up the head.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name is None:
        owners = [path for path, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
        if not owners:
            raise SettingError("model", type(model).__name__, "it has no parameters, so it has no head")
        return owners[-1]
    if name not in modules or not _trainable(modules[name]):
        raise unknown("head", name, [path for path, child in model.named_children() if _trainable(child)])
    return name


def head_parameters(model: nn.Module, name: str | None = None) -> list[str]:
    """Names of the head's parameters, as in `model.named_parameters()`."""
    path = head(model, name)
    return [parameter for parameter, _ in model.get_submodule(path).named_parameters(prefix=path)]


def has_body(model: nn.Module, name: str | None = None) -> bool:
    """Whether anything is left outside the head. A linear model is all head."""
    return len(head_parameters(model, name)) < len(list(model.parameters()))


def _trainable(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
