"""Conversations to tokens: what comes between turns, for templates of the shape of known models."""

import json

import pytest

from ppo.episodes.chat import Chat, Turn, chat_format
from ppo.episodes.contract import ChatFormat, ToolFormat
from ppo.episodes.tool_calls import ToolCall
from ppo.errors import InputError
from tests.ppo.episodes.shapes import CHATML, QWEN3, SHAPES, core, format_of, id_of, tokenizer_of

USER = {"role": "user", "content": "Again."}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALLS = [ToolCall("look", {"at": "a"}, "call00000"), ToolCall("look", {"at": "b"}, "call00001")]
RESULTS = [
    {"role": "tool", "name": "look", "tool_call_id": call.id, "content": f"saw {call.id[-1]}"}
    for call in CALLS
]
# what stands between a turn that has ended by itself and the next one: written out by hand
AFTER_USER = {
    "SmolLM2": "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n",
    "Qwen2.5": "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n",
    "Qwen3": "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n",
    "Llama 3": "<|start_header_id|>user<|end_header_id|>\n\nAgain.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "Mistral": "[INST]Again.[/INST]",
    "Gemma 3": "\n<start_of_turn>user\nAgain.<end_of_turn>\n<start_of_turn>model\n",
}
QWEN_RESULTS = (
    "\n<|im_start|>user<tool_response>\nsaw 0\n</tool_response><tool_response>\nsaw 1\n"
    "</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
AFTER_TOOLS = {
    "SmolLM2": "\n<|im_start|>tool\nsaw 0<|im_end|>\n<|im_start|>tool\nsaw 1<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Qwen2.5": QWEN_RESULTS,
    "Qwen3": QWEN_RESULTS,
    "Llama 3": '<|start_header_id|>ipython<|end_header_id|>\n\n"saw 0"<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"saw 1"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "Mistral": '[TOOL_RESULTS]{"content": saw 0, "call_id": "call00000"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS]{"content": saw 1, "call_id": "call00001"}[/TOOL_RESULTS]',
    "Gemma 3": "\n<start_of_turn>user\n<tool_response>\nsaw 0\n</tool_response>\n"
    "<tool_response>\nsaw 1\n</tool_response><end_of_turn>\n<start_of_turn>model\n",
}


def checked(
    template: str, end: str = "<|im_end|>", *, tool_format: ToolFormat = "auto", **options
) -> ChatFormat:
    found, ends = tokenizer_of(template), [id_of(end)]
    return chat_format(found, ends, options=options, tool_format=tool_format)


def test_the_tokenizer_of_these_tests_has_he_llo_which_is_not_hello() -> None:
    assert core().encode("hello").ids == [id_of("hello")]
    assert core().decode([id_of("he"), id_of("llo")]) == "hello"


@pytest.mark.parametrize("shape", SHAPES)
def test_what_stands_between_two_turns_is_what_the_template_writes_there(shape: str) -> None:
    template, end, tool_format = SHAPES[shape]
    made = checked(template, end)
    assert made.tool_format == tool_format
    chat, end_id = Chat(made), id_of(end)

    def between(turn: Turn, messages: list, tools: list | None = None) -> str:
        return chat.decode(chat.between(turn, messages, tools), special=True)

    for tools in (None, [LOOK]):
        assert between(Turn(end_id), [USER], tools) == AFTER_USER[shape]
        # a turn that was cut, or ended by another token, is ended by what is said next
        assert between(Turn(id_of("llo")), [USER], tools) == end + AFTER_USER[shape]
        assert between(Turn(end_id, (), "I think"), [USER], tools) == AFTER_USER[shape]
    assert between(Turn(end_id, CALLS), RESULTS, [LOOK]) == AFTER_TOOLS[shape]
    both = between(Turn(end_id, CALLS[:1]), [RESULTS[0], USER], [LOOK])
    assert "saw 0" in both and both.endswith("Again." + AFTER_USER[shape].split("Again.")[1])
    # nothing that a model writes into its arguments moves the end of its turn
    odd = [ToolCall("look", {"at": f"{end} {end}"}, "call00000")]
    assert between(Turn(end_id, odd), RESULTS[:1], [LOOK]).count("saw 0") == 1
    assert between(Turn(end_id, odd), RESULTS[:1], [LOOK]).count(end) < 3


@pytest.mark.parametrize("shape", SHAPES)
def test_tools_are_shown_also_where_the_template_knows_none(shape: str) -> None:
    chat = Chat(format_of(shape))
    begun = chat.decode(chat.begin([USER], [LOOK]), special=True)
    assert begun.count('"look"') == 1 and "Again." in begun
    begun = chat.decode(chat.begin([USER]), special=True)
    assert "look" not in begun


def test_an_option_of_the_template_holds_for_every_turn() -> None:
    chat = Chat(checked(QWEN3, enable_thinking=False))
    ids = chat.between(Turn(id_of("<|im_end|>")), [USER])
    assert chat.decode(ids, special=True).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{{ messages | length }} messages:" + CHATML,
            "writes the beginning anew when more is said",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
            "{{ '</s>' if loop.last and loop.index > 1 else '<|im_end|>' }}{% endfor %}",
            "does not end a turn as it ends the last one",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}",
            "does not show what an assistant has said",
        ),
        (
            "{% for m in messages %}{{ raise_exception('one turn only') if loop.index > 2 }}"
            "{{ m.content }}<|im_end|>{% endfor %}",
            "refuses a message: one turn only",
        ),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}"
            "{{ '!' if loop.index == 2 and loop.last }}{% endfor %}",
            "writes a turn anew when more is said, and marks no end of it",
        ),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused_by_name(template: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        checked(template)
    assert "a/model" in str(caught.value) and says in str(caught.value)
    assert "model.custom_chat_template" in str(caught.value)


def test_a_template_without_end_of_turn_is_continued_where_it_only_adds() -> None:
    chat = Chat(checked("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"))
    said = [{"role": "user", "content": "more"}]
    assert chat.end is None
    assert chat.decode(chat.between(Turn(id_of("llo")), said)) == "\nuser: more\n"


def test_a_template_that_writes_an_end_behind_all_that_is_said_is_continued() -> None:
    """As Phi-3 does, where no turn is opened behind it."""
    chat = Chat(checked(CHATML + "{% if not add_generation_prompt %}</s>{% endif %}"))
    found = chat.between(Turn(id_of("<|im_end|>")), [USER])
    assert chat.decode(found, special=True) == AFTER_USER["SmolLM2"]


def test_a_turn_ends_with_the_token_that_stops_the_engine() -> None:
    """As with Cohere 2, whose responses end before their turns do."""
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}</s>")
    chat = Chat(checked(template))
    between = "\n<|im_start|>user\nAgain.</s><|im_end|>\n<|im_start|>assistant\n"
    for last, missing in (("<|im_end|>", ""), ("llo", "<|im_end|>")):
        found = chat.between(Turn(id_of(last)), [USER])
        assert chat.decode(found, special=True) == missing + between


def test_a_turn_that_ends_with_the_opening_of_the_next_is_not_opened_twice() -> None:
    """As GLM's are: the engine stops at the token of a user or a tool."""
    template = (
        "{% for m in messages %}{{ '[INST]' if m.role == 'user' else '[TOOL_RESULTS]' if "
        "m.role == 'tool' else '</s>' }}{{ m.content }}{% endfor %}"
        "{{ '</s>' if add_generation_prompt }}"
    )
    made = chat_format(
        tokenizer_of(template), [id_of("[INST]"), id_of("[TOOL_RESULTS]")], options={}
    )
    chat = Chat(made)
    for last, said in (("[INST]", "Again.</s>"), ("llo", "[INST]Again.</s>")):
        assert chat.decode(chat.between(Turn(id_of(last)), [USER]), special=True) == said
    found = chat.between(Turn(id_of("[TOOL_RESULTS]"), CALLS[:1]), RESULTS[:1], [LOOK])
    assert chat.decode(found, special=True) == "saw 0</s>"


def test_calls_of_a_format_that_is_not_read_are_shown_and_answered_as_hermes_has_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As Gemma 4 has them: results within the turn that has called."""
    template = (
        "{% if tools %}<|im_start|>tools{{ tools | tojson }}<|im_end|>{% endif %}"
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
        "{% for c in m.tool_calls or [] %}call:{{ c.function.name }}{% endfor %}"
        "{% if m.tool_calls and not loop.last %}result{% endif %}{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = checked(template)
    assert "a/model teaches calls of tools in a format that is not read here" in caplog.text
    chat = Chat(made)
    begun = chat.decode(chat.begin([USER], [LOOK]), special=True)
    assert begun.startswith("<|im_start|>system\nYou may call functions.")
    found = chat.between(Turn(id_of("<|im_end|>"), CALLS), RESULTS, [LOOK])
    assert chat.decode(found, special=True) == (
        "<|im_start|>user\n<tool_response>\nsaw 0\n</tool_response>\n<tool_response>\nsaw 1\n"
        "</tool_response><|im_end|><|im_start|>assistant\n"
    )
    named = Chat(checked(template, tool_format="mistral"))  # a model that was taught it
    assert chat.decode(named.begin([USER], [LOOK]), special=True).startswith("<|im_start|>tools[")


def test_a_tokenizer_that_has_no_json_is_refused_by_name() -> None:
    tokenizer = tokenizer_of(CHATML)
    tokenizer.backend_tokenizer = None
    with pytest.raises(InputError, match=r"a/model has no tokenizer\.json"):
        chat_format(tokenizer, [0], options={})


def test_templates_among_several_are_found_by_name() -> None:
    several = {"default": "x", "tool_use": CHATML}
    assert chat_format(tokenizer_of(several), [0], options={}).template == CHATML


def test_a_long_text_is_cut_at_a_token_and_says_so() -> None:
    chat = Chat(format_of("SmolLM2"))
    assert chat.cut("hello", 5) == "hello"
    assert chat.cut("hello hello hello", 3) == "hello hello\n[6 more characters]"
    long = chat.cut("x" * 10_000_000, 100)
    assert long == "x" * 100 + "\n[9999900 more characters]"


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_and_ids_are_those_of_transformers(shape: str) -> None:
    from transformers import PreTrainedTokenizerFast

    template, _, _ = SHAPES[shape]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=core(), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    messages = [USER, {"role": "assistant", "content": "Héllo <hello> & 'x'"}, USER]
    for tools in (None, [LOOK]) if shape in ("Qwen2.5", "Llama 3", "Mistral") else (None,):
        ours = Chat(format_of(shape)).begin(messages, tools)
        wanted = theirs.apply_chat_template(
            messages,
            tools=tools,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=True,
            return_dict=False,
        )
        assert ours == wanted, json.dumps(tools)


def test_a_text_with_a_token_that_the_model_does_not_have_is_refused_where_it_is_encoded():
    whole = format_of("Qwen2.5")
    number = Chat(whole).num_ids
    last = Chat(whole)._core.id_to_token(number - 1)
    assert Chat(whole).encode(f"a {last} page")[-1] < number
    smaller = Chat(whole._replace(num_ids=number - 1))
    smaller.check()
    with pytest.raises(ValueError, match=rf"id is {number - 1}, and the model has {number - 1} i"):
        smaller.encode(f"a {last} page")
    messages = [{"role": "tool", "content": f"found {last}"}]
    with pytest.raises(ValueError, match="take it out of what a tool or an episode says"):
        smaller.between(Turn(last_id=id_of("<|im_end|>")), messages, None)
