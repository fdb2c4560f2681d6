"""Nodes report only the kind of an error. Its text may contain a sample or a path, so it goes to the node's own log."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from logging import ERROR, getLogger

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode

from fedagg.errors import SettingError

log = getLogger("flwr").log
# Python's own classes: their names reveal nothing about a node's data, as a user's class name might.
KINDS = {kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)}
# Settings of a node and of its two functions. Other settings may contain the number of a sample.
SETTINGS = (
    *("partition-id", "state-dir", "device", "data(context)", "model()", "x_train", "y_train", "x_test", "y_test", "labels"),
    *("metric", "quiet", "secure"),
)


def kind(error: Exception) -> str:
    if isinstance(error, SettingError) and (setting := error.setting.partition("[")[0]) in SETTINGS:  # not which sample
        return f"setting {setting}"
    return next(parent.__name__ for parent in type(error).__mro__ if parent in KINDS)


def redact_errors(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod around everything a node does."""
    try:
        return call_next(message, context)
    except Exception as error:
        log(ERROR, "the server is told only %r:", kind(error), exc_info=error)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, kind(error)), reply_to=message)
