"""Dispatch of events: who is called, with what, and what becomes of the answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from windlass.callbacks.early_stopping import EarlyStoppingCallback
from windlass.callbacks.flow import DefaultFlowCallback
from windlass.callbacks.handler import CallbackHandler
from windlass.callbacks.progress import PrinterCallback
from windlass.config.callback_interface import TrainerCallback
from windlass.core.errors import ConfigError
from windlass.core.events import CONTROL_FLAGS, EVENTS, TrainerControl, TrainerState
from windlass.dist.beacon import beacon
from windlass.dist.watchdog import OtherRanks, Watchdog


class Recorder(TrainerCallback):
    """Records what it receives at the two events that it overrides."""

    def __init__(self, answer: Any = None) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.answer = answer

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        self.told.append(("on_step_end", kwargs))
        return self.answer

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> Any:
        self.told.append(("on_log", {"logs": logs, **kwargs}))
        return self.answer


def handler_of(*callbacks: Any) -> CallbackHandler:
    return CallbackHandler([DefaultFlowCallback, *callbacks], "model", "tokenizer", "optimizer", "schedule")


@pytest.fixture
def calls(make_args: Any) -> tuple[Any, TrainerState, TrainerControl]:
    return make_args(), TrainerState(global_step=1, max_steps=10), TrainerControl()


# --- who is called, and with what ---------------------------------------------------------------------------


def test_everything_is_handed_on_by_name_and_follows_assignment(calls: Any) -> None:
    recorder = Recorder()
    handler = handler_of(recorder)
    handler.train_dataloader, handler.optimizer = "loader", "other optimizer"
    handler.on_log(*calls, {"loss": 1.0})
    expected = {
        "logs": {"loss": 1.0},
        "model": "model",
        "processing_class": "tokenizer",
        "optimizer": "other optimizer",
        "lr_scheduler": "schedule",
        "train_dataloader": "loader",
        "eval_dataloader": None,
    }
    assert recorder.told == [("on_log", expected)]


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_an_object_that_has_it(event: str, calls: Any) -> None:
    told = []
    listener = SimpleNamespace(**{event: lambda args, state, control, **kwargs: told.append(kwargs)})
    handler = handler_of(listener)
    assert handler.listens(event)
    payload = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}.get(event)
    assert getattr(handler, event)(*calls, **({payload: {"a": 1}} if payload else {})) is calls[2]
    assert len(told) == 1
    if payload:
        assert told[0][payload] == {"a": 1}


def test_an_assigned_call_event_makes_all_calls_with_arguments_of_its_own(calls: Any) -> None:
    told: list[Any] = []
    handler = handler_of(SimpleNamespace(on_save=lambda args, *rest, **kwargs: told.append(args)))

    def call(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for callback in handler.callbacks:
            getattr(callback, event, lambda *values, **named: None)(
                "other arguments", state, control, **kwargs
            )
        told.append((event, args, kwargs))
        return {"should_log": True}

    handler.call_event = call
    args, state, control = calls
    assert handler.listens("on_step_end")
    assert handler.on_save(args, state, control) is control
    handler.on_log(args, state, control, {"loss": 1.0})
    assert told == ["other arguments", ("on_save", args, {}), ("on_log", args, {"logs": {"loss": 1.0}})]
    assert control.should_log


def test_inherited_no_ops_are_not_listeners() -> None:
    handler = handler_of(Recorder())
    assert {event for event in EVENTS if handler.listens(event)} == {"on_step_end", "on_epoch_end", "on_log"}


def test_a_users_class_that_bears_the_base_class_name_is_called(calls: Any) -> None:
    told = []
    namesake = type("TrainerCallback", (TrainerCallback,), {"on_save": lambda *a, **k: told.append(1)})
    handler = handler_of(namesake)
    handler.on_save(*calls)
    assert told == [1]


def test_order_is_that_of_addition(calls: Any) -> None:
    order: list[str] = []

    def named(name: str) -> Any:
        return SimpleNamespace(on_save=lambda *a, **k: order.append(name))

    handler = handler_of(named("first"), named("second"))
    handler.callbacks.insert(0, named("inserted into the list itself"))
    handler.on_save(*calls)
    assert order == ["inserted into the list itself", "first", "second"]
    order.clear()
    handler.callbacks[-2] = named("in place of the first")
    handler.on_save(*calls)
    assert order == ["inserted into the list itself", "in place of the first", "second"]


def test_a_method_assigned_later_is_seen_when_training_begins(calls: Any) -> None:
    recorder, told = Recorder(), []
    handler = handler_of(recorder)
    recorder.on_train_begin = lambda *a, **k: told.append(1)  # type: ignore[method-assign]
    handler.on_train_begin(*calls)
    assert told == [1]


def test_unknown_event_is_an_error(calls: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown event 'on_foo'.*on_step_end"):
        handler_of().fire("on_foo", *calls)


def test_an_error_names_the_callback(calls: Any) -> None:
    class Broken(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError) as caught:
        handler_of(Broken).on_save(*calls)
    assert "Broken.on_save" in caught.value.__notes__[0]


def test_a_callback_that_hangs_in_an_update_is_named(calls: Any, caplog: pytest.LogCaptureFixture) -> None:
    dog = Watchdog(beacon(), OtherRanks({}, 60), report_after=60, limit=1800)

    class Slow(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for _ in range(2):
                dog.look(61)

    beacon().call("forward and backward", 3)
    handler_of(Slow).on_step_begin(*calls)
    (said,) = caplog.messages
    assert "no progress for 61 s [step 3, in 'callback Slow.on_step_begin']" in said
    assert beacon().mark().call == "forward and backward"


# --- what becomes of the answer -----------------------------------------------------------------------------


def test_a_dict_sets_flags(calls: Any) -> None:
    control = handler_of(Recorder({"should_save": True, "should_training_stop": True})).on_step_end(*calls)
    assert control is calls[2]
    assert control == TrainerControl(should_save=True, should_training_stop=True)


def test_a_new_control_is_copied_into_ours(calls: Any) -> None:
    control = handler_of(Recorder(TrainerControl(should_log=True))).on_step_end(*calls)
    assert control is calls[2]
    assert control == TrainerControl(should_log=True)


def test_any_object_with_the_five_flags_is_a_control(calls: Any) -> None:
    foreign = SimpleNamespace(**dict.fromkeys(CONTROL_FLAGS, False), extra=1)
    foreign.should_evaluate = True
    assert handler_of(Recorder(foreign)).on_step_end(*calls) == TrainerControl(should_evaluate=True)


def test_what_is_neither_is_refused(calls: Any) -> None:
    with pytest.raises(TypeError, match="returned int"):
        handler_of(Recorder(3)).on_step_end(*calls)
    with pytest.raises(ValueError, match="'should_stop', which is not a control flag"):
        handler_of(Recorder({"should_stop": True})).on_step_end(*calls)


@pytest.mark.parametrize(
    ("event", "cleared"),
    [
        ("on_train_begin", {"should_training_stop"}),
        ("on_epoch_begin", {"should_epoch_stop"}),
        ("on_step_begin", {"should_log", "should_evaluate", "should_save"}),
        ("on_log", {"should_log"}),
        ("on_evaluate", {"should_evaluate"}),
        ("on_save", {"should_save"}),
        ("on_optimizer_step", set()),
    ],
)
def test_a_request_is_cleared_by_the_event_that_answers_it(event: str, cleared: set[str], calls: Any) -> None:
    control = TrainerControl(**dict.fromkeys(CONTROL_FLAGS, True))
    handler_of().fire(event, calls[0], calls[1], control)
    assert {flag for flag in CONTROL_FLAGS if not getattr(control, flag)} == cleared


# --- who is there -------------------------------------------------------------------------------------------


def test_classes_and_instances_come_and_go() -> None:
    recorder = Recorder()
    handler = handler_of(recorder, PrinterCallback)
    assert handler.callback_list == "DefaultFlowCallback\nRecorder\nPrinterCallback"
    assert handler.pop_callback(recorder) is recorder
    assert handler.pop_callback(Recorder) is None
    assert handler.pop_callback(recorder) is None
    assert not handler.listens("on_predict")
    handler.add_callback(recorder)
    assert isinstance(handler.pop_callback(Recorder), Recorder)
    handler.remove_callback(PrinterCallback)
    handler.remove_callback(PrinterCallback)
    assert handler.callback_list == "DefaultFlowCallback"
    assert not handler.listens("on_log")


def test_of_two_equal_callbacks_the_one_that_is_given_is_removed() -> None:
    """As of dataclasses with the same values."""
    saved = Recorder().on_save
    first, second, another = (SimpleNamespace(on_save=saved) for _ in range(3))
    assert first == second
    handler = handler_of(first, second)
    handler.remove_callback(second)
    assert [one for one in handler.callbacks if one == first] == [first]
    assert any(one is first for one in handler.callbacks)
    handler.remove_callback(another)
    assert first not in handler.callbacks, "an equal one, if the given one is not among them"


def test_removing_an_absent_instance_is_an_error() -> None:
    with pytest.raises(ValueError, match="Recorder is not among the callbacks: DefaultFlowCallback"):
        handler_of().remove_callback(Recorder())


def test_duplicates_are_kept_and_named(log_lines: Any) -> None:
    handler = handler_of(PrinterCallback)
    handler.add_callback(PrinterCallback())
    assert len(handler.callbacks) == 3
    assert "Added a second PrinterCallback" in log_lines.text


def test_missing_flow_is_warned_of(log_lines: Any) -> None:
    CallbackHandler([PrinterCallback], None, None, None, None)
    assert "no DefaultFlowCallback" in log_lines.text


@pytest.mark.parametrize("garbage", [3, "on_log", print, object, {"on_log": print}, None])
def test_garbage_is_refused(garbage: Any) -> None:
    with pytest.raises(ConfigError, match="none of the event methods"):
        handler_of(garbage)


def test_an_event_that_is_no_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_log is not a method"):
        handler_of(SimpleNamespace(on_log=3))


def test_a_class_that_needs_arguments_is_refused() -> None:
    class Needy(TrainerCallback):
        def __init__(self, path: str) -> None:
            self.path = path

    with pytest.raises(ConfigError, match=r"callbacks='Needy'.*give an instance"):
        handler_of(Needy)


def test_a_misspelt_event_is_warned_of(log_lines: Any) -> None:
    class Misspelt(TrainerCallback):
        def on_step_ends(self) -> None: ...

        def on_something_of_its_own(self) -> None: ...

    handler_of(Misspelt)
    assert (
        "Misspelt.on_step_ends is not an event and is never called; did you mean on_step_end?"
        in log_lines.text
    )
    assert "on_something" not in log_lines.text


# --- state --------------------------------------------------------------------------------------------------


class Counter(TrainerCallback):
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_several_instances_of_one_class_are_kept_apart() -> None:
    before = handler_of(EarlyStoppingCallback(5), EarlyStoppingCallback(7), Counter)
    before.callbacks[1].early_stopping_patience_counter = 1
    before.callbacks[2].early_stopping_patience_counter = 2
    before.callbacks[3].count = 3
    after = handler_of(Counter, EarlyStoppingCallback(5), EarlyStoppingCallback(7))
    held = list(after.callbacks)
    after.load_state_dict(before.state_dict())
    assert after.callbacks == held
    assert [cb.early_stopping_patience_counter for cb in held[2:]] == [1, 2]
    assert held[1].count == 3


def test_state_has_the_shape_of_transformers() -> None:
    state = handler_of(EarlyStoppingCallback(5)).state_dict()
    expected = {
        "args": {"early_stopping_patience": 5, "early_stopping_threshold": 0.0},
        "attributes": {"early_stopping_patience_counter": 0},
    }
    assert state == {"EarlyStoppingCallback": expected}
    assert isinstance(
        handler_of(EarlyStoppingCallback, EarlyStoppingCallback).state_dict()["EarlyStoppingCallback"], list
    )


def test_changed_set_of_callbacks_is_named(log_lines: Any) -> None:
    stored = handler_of(EarlyStoppingCallback(5), EarlyStoppingCallback(5)).state_dict()
    handler_of(Counter, EarlyStoppingCallback(5)).load_state_dict({**stored, "TrainerControl": {}})
    assert "that this run does not have: EarlyStoppingCallback" in log_lines.text
    assert "without a state in the checkpoint, which start from their defaults: Counter" in log_lines.text
    assert "TrainerControl" not in log_lines.text


def test_arguments_of_this_run_win_unless_asked_otherwise(log_lines: Any) -> None:
    stored = handler_of(EarlyStoppingCallback(5)).state_dict()
    stored["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"] = 4
    now = handler_of(EarlyStoppingCallback(9))
    now.load_state_dict(stored)
    stopper = now.callbacks[1]
    assert (stopper.early_stopping_patience, stopper.early_stopping_patience_counter) == (9, 4)
    assert "early_stopping_patience=9 differs from 5 in the checkpoint" in log_lines.text
    now.load_state_dict(stored, restore_args=True)
    assert now.callbacks[1] is stopper
    assert (stopper.early_stopping_patience, stopper.early_stopping_patience_counter) == (5, 4)


def test_a_state_method_of_another_meaning_is_not_saved_and_is_named(log_lines: Any) -> None:
    class Odd(TrainerCallback):
        def state(self) -> str:
            return "running"

    assert handler_of(Odd).state_dict() == {}
    assert "Odd.state() returned str" in log_lines.text


# --- callbacks written for transformers ---------------------------------------------------------------------


@pytest.fixture
def theirs() -> Any:
    return pytest.importorskip("transformers")


def test_their_printer_prints(theirs: Any, calls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    handler = handler_of(theirs.PrinterCallback)
    assert {event for event in EVENTS if handler.listens(event)} == {"on_step_end", "on_epoch_end", "on_log"}
    handler.on_log(*calls, {"loss": 0.5, "total_flos": 1})
    assert capsys.readouterr().out == "{'loss': '0.5'}\n"


def test_their_early_stopping_stops_and_its_state_survives(theirs: Any, make_args: Any) -> None:
    args, state = make_args(eval_strategy="steps"), TrainerState(max_steps=10, best_metric=1.0)
    handler = handler_of(theirs.EarlyStoppingCallback(2))
    handler.on_train_begin(args, state, TrainerControl())
    assert not handler.on_evaluate(args, state, TrainerControl(), {"eval_loss": 2.0}).should_training_stop
    resumed = handler_of(EarlyStoppingCallback(2))  # ours reads the state of theirs
    resumed.load_state_dict(handler.state_dict())
    for stopper in (handler, resumed):
        assert stopper.on_evaluate(args, state, TrainerControl(), {"eval_loss": 2.0}).should_training_stop


def test_their_flow_and_control_work(theirs: Any, calls: Any, log_lines: Any) -> None:
    class Resetting(theirs.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control._new_step(), control._new_epoch(), control._new_training()
            return theirs.TrainerControl(should_epoch_stop=True)

    handler = CallbackHandler(
        [theirs.trainer_callback.DefaultFlowCallback, Resetting], None, None, None, None
    )
    assert "DefaultFlowCallback" not in log_lines.text
    args, state, control = calls
    state.global_step = 10
    assert handler.on_step_end(args, state, control) == TrainerControl(
        should_save=True, should_training_stop=True
    )
    assert handler.on_save(args, state, control) == TrainerControl(should_epoch_stop=True)


def test_our_callbacks_are_found_by_their_classes(theirs: Any) -> None:
    handler = handler_of(PrinterCallback)
    assert isinstance(handler.pop_callback(theirs.PrinterCallback), PrinterCallback)
    assert handler.pop_callback(theirs.PrinterCallback) is None
