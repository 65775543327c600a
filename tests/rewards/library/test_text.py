import pytest

from postgrad.errors import RecipeError
from postgrad.rewards.base import view_of
from postgrad.rewards.library import keyword, language, refusal
from postgrad.rewards.load import load_rewards
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason


def view(text, *, prompt="q", reasoning=""):
    segments = (Segment(Source.PROMPT, (0,)), Segment(Source.MODEL, (1,), (-0.1,)))
    messages = (Message("assistant", text, reasoning=reasoning),)
    return view_of(Prompt("r", (Message("user", prompt),)), Rollout(segments, messages, StopReason.END, text=text))


ENGLISH = "The cat is on the table and it was not there for a long time."
GERMAN = "Die Katze ist nicht auf dem Tisch, und sie war auch nicht im Haus mit der Maus."


@pytest.mark.parametrize(
    ("wanted", "text", "value"),
    [
        ("en", ENGLISH, 1.0),
        ("de", GERMAN, 1.0),
        ("en", GERMAN, 0.0),
        ("de", ENGLISH, 0.0),
        ("fr", "Le chat est sur la table et il ne veut pas partir avec les autres.", 1.0),
        ("es", "El gato no está en la mesa, pero los perros son de una casa que está cerca.", 1.0),
        ("zh", "我们今天去公园散步，然后回家吃饭休息。", 1.0),
        ("ja", "今日は公園に行って、それから家で食べました。", 1.0),
        ("zh", "今日は公園に行って、それから家で食べました。", 0.0),
        ("ja", "我们今天去公园散步，然后回家吃饭休息。", 0.0),
        ("ru", "Сегодня мы идём в парк", 1.0),
        ("zh", ENGLISH, 0.0),
        ("en", "我们今天去公园散步，然后回家吃饭休息。", 0.0),
        ("en", "", None),
        ("en", "42", None),
        ("en", "Paracetamol Ibuprofen Aspirin", None),
        ("xx", ENGLISH, None),
        (None, ENGLISH, None),
        ("en", f"<think>{GERMAN}</think>{ENGLISH}", 1.0),
        ("en", f"<think>{ENGLISH}</think>", None),
        ("de", f"{GERMAN}\n```python\nfor the_thing in the_list_of_things: and_it_is(the_thing)\n```", 1.0),
    ],
)
def test_language(wanted, text, value):
    assert language(view(text), wanted) == value


def test_a_mixture_of_scripts_earns_its_share():
    assert 0.4 < language(view("Сегодня мы идём in the park of the city"), "ru") < 0.6


def test_an_unknown_language_in_the_recipe_is_named():
    with pytest.raises(RecipeError, match="no language 'klingon'"):
        load_rewards([{"use": "language", "args": {"language": "klingon"}}], ".")


REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "I am not able to provide that information.",
    "I won't help you do this.",
    "I must decline.",
    "That is against my guidelines.",
    "抱歉，我无法协助完成这个请求。",
    "<think>Here is a list: 1. no</think>I can’t help with that.",
]
ANSWERS = [
    "Paris.",
    "I am sorry to hear that. Try resting.",
    "You can't divide by zero.",
    "I can help with that.",
    "Sure: 1. boil water 2. stir",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals_are_recognised(text):
    assert refusal(view(text), True) == 1.0
    assert refusal(view(text), False) == 0.0


@pytest.mark.parametrize("text", ANSWERS)
def test_answers_are_no_refusals(text):
    assert refusal(view(text), True) == 0.0
    assert refusal(view(text), "false") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "I can't help with that. Here is how:\n1. first",
        "I cannot provide this.\n```\ncode\n```",
        "I can't help with that. " + "word " * 130,
    ],
)
def test_refusing_and_then_helping_is_neither(text):
    assert refusal(view(text), True) == 0.0
    assert refusal(view(text), False) == 0.0


@pytest.mark.parametrize("label", [None, "", "maybe", 2, 0.5])
def test_an_unclear_label_abstains(label):
    assert refusal(view("no"), label) is None


WANTED = ["river", "old bridge", "boat"]


@pytest.mark.parametrize(
    ("text", "wanted", "forbidden", "value"),
    [
        ("A boat went under the old bridge on the river yesterday", WANTED, (), 1.0),
        ("A boat went down the River yesterday", WANTED, (), pytest.approx(2 / 3)),
        ("A boat went under the old bridge on the river yesterday", WANTED, ("yesterday",), 0.0),
        ("river old bridge boat", WANTED, (), 0.0),
        ("river, old bridge, boat, river, old bridge, boat and so on", WANTED, (), 0.0),
        ("riverside boats", ["river", "boat"], (), 0.0),
        ("Paris", "Paris", (), 1.0),
        ("<think>Paris</think>Rome", "Paris", (), 0.0),
        ("fine", (), "bad", 1.0),
        ("", (), "bad", 0.0),
        ("bad", (), "bad", 0.0),
        ("x", (), (), None),
        ("x", None, (), None),
        ("a.b", ["a.b"], (), 1.0),
        ("axb", ["a.b"], (), 0.0),
    ],
)
def test_keyword(text, wanted, forbidden, value):
    assert keyword(view(text), wanted, forbidden) == value
