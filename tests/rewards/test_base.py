import inspect
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from postgrad.rewards.base import RolloutView, bind, call_form, declaration_of, reward, view_of
from postgrad.rewards.child import as_float
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall

CALL = ToolCall("add", {"a": 1}, id="call_0")
ROLLOUT = Rollout(
    segments=(
        Segment(Source.PROMPT, (9, 8)),
        Segment(Source.MODEL, (5, 6), (-0.1, -0.2)),
        Segment(Source.TOOL, (7,)),
        Segment(Source.MODEL, (4,), (-0.3,)),
    ),
    messages=(
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "2", tool_call_id="call_0", name="add"),
        Message("assistant", "two"),
    ),
    stop=StopReason.END,
    text="call 2 two",
    raw_text="<call> 2 two<end>",
)
PROMPT = Prompt("data.jsonl:1", (Message("system", "be brief"), Message("user", "1 + 1?")), {"answer": "2", "level": 3})
ROW = (view_of(PROMPT, ROLLOUT), dict(PROMPT.columns))


def call(function, rows=(ROW,), **args):
    positional, keywords = bind(call_form(function, args), rows, args)
    return function(*positional, **keywords)


def test_view_separates_sampled_tokens_from_all_tokens():
    view = view_of(PROMPT, ROLLOUT)
    assert view.token_ids == (9, 8, 5, 6, 7, 4)
    assert view.sampled_ids == (5, 6, 4)
    assert (view.sampled_tokens, view.turns, view.final_answer, view.prompt_text) == (3, 2, "two", "1 + 1?")
    assert (view.text, view.raw_text) == ("call 2 two", "<call> 2 two<end>")


def test_sampled_ids_of_forks_come_in_the_order_they_were_written():
    earlier = (Segment(Source.PROMPT, (9,)), Segment(Source.MODEL, (1, 2), (-0.1, -0.1)))
    forked = Rollout((Segment(Source.PROMPT, (9, 1)), Segment(Source.MODEL, (3,), (-0.1,))), (), StopReason.END, forks=(earlier,))
    assert view_of(PROMPT, forked).sampled_ids == (1, 2, 3)


def test_raw_text_prompt_is_the_prompt_text():
    assert view_of(Prompt("r", (), raw_text="Once"), ROLLOUT).prompt_text == "Once"


def test_view_cannot_be_changed():
    with pytest.raises(AttributeError):
        ROW[0].text = "other"


def test_rollout_form_gets_the_view_and_columns_by_name():
    assert call(lambda rollout, answer: (rollout, answer)) == (ROW[0], "2")


def test_annotated_first_parameter_may_have_any_name():
    def by_class(r: RolloutView, level):
        return r.final_answer, level

    def by_text(r: "RolloutView"):
        return r.turns

    assert call(by_class) == ("two", 3)
    assert call(by_text) == 2


def test_completion_form_gets_the_last_assistant_message():
    assert call(lambda completion, prompt, answer: (completion, prompt, answer)) == ("two", "1 + 1?", "2")


def test_trl_form_gets_lists_of_messages_and_column_lists():
    def trl(prompts, completions, answer):
        return prompts, completions, answer

    prompts, completions, answer = call(trl, [ROW, ROW])
    assert answer == ["2", "2"]
    assert prompts[0][-1] == {"role": "user", "content": "1 + 1?"}
    assert completions[1][-1] == {"role": "assistant", "content": "two"}
    assert completions[0][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert completions[0][1] == {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call_0"}


def test_trl_form_without_kwargs_is_not_given_columns_it_does_not_name():
    assert call(lambda prompts, completions: len(completions)) == 1


def test_kwargs_receive_every_column_and_trls_own_arguments():
    seen = call(lambda completions, **kwargs: kwargs)
    assert sorted(seen) == ["answer", "completion_ids", "level", "prompts"]
    assert seen["completion_ids"] == [[5, 6, 4]]
    assert call(lambda rollout, **columns: columns) == {"answer": "2", "level": 3}


def test_column_with_a_default_may_be_absent():
    form = call_form(lambda rollout, answer, hint="none": 0)
    assert (form.required, form.optional) == (("answer",), ("hint",))
    assert call(lambda rollout, hint="none": hint) == "none"


def test_bound_arguments_are_no_columns():
    def scaled(rollout, answer, *, factor):
        return factor

    assert call_form(scaled, {"factor": 2.0}).required == ("answer",)
    assert call(scaled, factor=2.0) == 2.0
    with pytest.raises(ValueError, match="no argument 'facto'; its parameters are rollout, answer, factor"):
        call_form(scaled, {"facto": 2.0})


def test_group_form_gets_all_views_and_single_column_values():
    @reward(group=True)
    def spread(rollouts, answer):
        return [len(rollouts), answer]

    assert call(spread, [ROW, ROW, ROW]) == [3, "2"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 0, "first parameter is `rollout`"),
        (lambda *args: 0, "first parameter is `rollout`"),
        (lambda answer, rollout: 0, "first parameter 'answer'"),
        (lambda rollouts: 0, "group=True"),
        (reward(group=True)(lambda rollout: 0), "its first parameter is `rollouts`"),
        (lambda completions, trainer_state: 0, "'trainer_state', which only TRL"),
    ],
)
def test_signature_that_fits_no_form_is_explained(function, message):
    with pytest.raises(ValueError, match=message):
        call_form(function)


def test_trl_only_argument_with_a_default_is_left_alone():
    assert call(lambda completions, log_metric=None: log_metric) is None


def test_async_functions_and_callables_are_recognised():
    async def plain(rollout):
        return 1

    class Judge:
        async def __call__(self, completion):
            return 1

    assert call_form(plain).asynchronous
    assert call_form(Judge()).asynchronous
    assert not call_form(lambda rollout: 0).asynchronous


def test_decorator_returns_the_function_itself():
    def plain(rollout):
        return 1

    marked = reward(scope="final", claim="c", range=(0, 2), role="outcome", deadline_s=3.0, name="n")(plain)
    assert marked is plain
    declared = declaration_of(plain)
    assert (declared.scope, declared.claim, declared.range, declared.role, declared.deadline_s, declared.name) == (
        "final",
        "c",
        (0, 2),
        "outcome",
        3.0,
        "n",
    )
    assert declaration_of(inspect.signature) is None


@pytest.mark.parametrize("bad", [{"scope": "finals"}, {"role": "task"}, {"range": (1, 0)}, {"range": (float("nan"), 1)}, {"deadline_s": 0}])
def test_declaration_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        reward(**bad)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (3, 3.0),
        (0.5, 0.5),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(1.5), 1.5),
        (10**400, float("inf")),
        (-(10**400), float("-inf")),
    ],
)
def test_every_kind_of_number_becomes_a_float(value, expected):
    result = as_float(value)
    assert type(result) is float
    assert result == expected


def test_torch_scalars_become_floats_and_vectors_do_not():
    torch = pytest.importorskip("torch")
    assert as_float(torch.tensor(0.5)) == 0.5
    assert as_float(torch.tensor(True)) == 1.0
    with pytest.raises(TypeError):
        as_float(torch.tensor([0.5]))


@pytest.mark.parametrize("value", ["1", b"1", [1], (1,), {"score": 1}, 1j, object(), np.array([1.0])])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError):
        as_float(value)
