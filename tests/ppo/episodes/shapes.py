"""Chat templates of the shapes of known models, and a tokenizer in which he + llo is not hello."""

from functools import cache
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ppo.episodes.contract import ChatFormat, ToolFormat

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "You help.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}"
    "{% endfor %}\n</tools>\nWrite <tool_call>\n{...}\n</tool_call><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{% endif %}"
)
QWEN_CALLS = (
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
QWEN_TOOL = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN25 = (
    QWEN_TOOLS + "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n"
    "{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ m.content }}" + QWEN_CALLS + "<|im_end|>\n{% elif m.role == 'tool' %}" + QWEN_TOOL
) + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# strips the thinking of turns before the last user's message, and writes an empty one for the last
QWEN3 = (
    QWEN_TOOLS + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set think = m.reasoning_content or '' %}"
    "{% if loop.index0 > ns.last and (loop.last or think) %}<think>\n{{ think }}\n</think>\n\n"
    "{% endif %}{{ m.content }}" + QWEN_CALLS + "<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# tools stand in the first user's message; one call in a turn; what a tool says comes from ipython
LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set sys = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n{{ sys }}<|eot_id|>"
    "{% if tools %}{% set first = messages[0].content %}{% set messages = messages[1:] %}"
    '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format {"name": function name, '
    '"parameters": dictionary of argument name and its value}.\n{% for t in tools %}'
    "{{ t | tojson(indent=4) }}\n\n{% endfor %}{{ first }}<|eot_id|>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": '
    '"{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% elif m.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>{% else %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# tools stand before the last user's message; no generation prompt; ids of calls have nine letters
MISTRAL = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == users[-1] %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings "
    'with length 9!\') }}{% endif %}{"name": "{{ c.function.name }}", "arguments": '
    '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ \', \' if not loop.last }}'
    "{% endfor %}]{{ eos_token }}{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    '{% elif m.role == \'tool\' %}[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": '
    '"{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)
# knows neither system messages of its own nor tools; roles must alternate
GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set head = messages[0].content + "
    "'\n\n' %}{% set messages = messages[1:] %}{% else %}{% set head = '' %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ head if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SHAPES = {
    "SmolLM2": (CHATML, "<|im_end|>", "hermes"),
    "Qwen2.5": (QWEN25, "<|im_end|>", "hermes"),
    "Qwen3": (QWEN3, "<|im_end|>", "hermes"),
    "Llama 3": (LLAMA3, "<|eot_id|>", "llama3"),
    "Mistral": (MISTRAL, "</s>", "mistral"),
    "Gemma 3": (GEMMA3, "<end_of_turn>", "hermes"),
}
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
    *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    "[/TOOL_RESULTS]",
]


@cache
def core() -> Tokenizer:
    """Bytes, `he`, `ll`, `llo`, `hello`, and the special tokens of all shapes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["he", "ll", "llo", "hello"]
    vocab = {piece: i for i, piece in enumerate([*letters, *pieces])}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in SPECIAL])
    return made


def id_of(piece: str) -> int:
    found = core().token_to_id(piece)
    assert found is not None
    return found


def tokenizer_of(template: Any, name: str = "a/model") -> Any:
    """As transformers' tokenizers look, as far as `chat_format` reads them."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return SimpleNamespace(
        backend_tokenizer=core(),
        chat_template=template,
        name_or_path=name,
        special_tokens_map=special,
    )


def format_of(shape: str, **options: Any) -> ChatFormat:
    """The chat format of a shape, unchecked."""
    template, end, tool_format = SHAPES[shape]
    kind: ToolFormat = tool_format  # pyright: ignore[reportAssignmentType]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatFormat(shape, core().to_str(), template, special, (id_of(end),), options, kind)
