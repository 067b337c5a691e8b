"""Chat templates of well-known models as they are published (tools, dates and other branches left out), one with
generation marks; and of one conversation the text and the answers that a person reads out of each.

Compared with public copies of the originals: each renders what its original does. Vicuna's tokenizer has none; its
format is FastChat's `vicuna_v1.1`.
"""

from ctcdraft.data.records import Conversation
from ctcdraft.data.template import NO_ARGS, render

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye?"},
    {"role": "assistant", "content": "So long."},
]

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN_2_5 = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\\n' }}{%- endif %}\n{%- for message in messages %}"
    '{%- if (message.role == "user") or (message.role == "system" and not loop.first) or '
    '(message.role == "assistant" and not message.tool_calls) %}'
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN_3 = (  # past thoughts are dropped, the last answer gets an empty one
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- set ns = namespace(last_query_index=messages|length - 1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_query_index = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}{%- set reasoning_content = '' %}"
    "{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}"
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + "
    "content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
LLAMA_3_1 = (  # a system turn in any case
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    '{%- set messages = messages[1:] %}{%- else %}{%- set system_message = "" %}{%- endif %}'
    '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}{{- "Cutting Knowledge Date: December 2023\\n" }}'
    '{{- "Today Date: 26 Jul 2024\\n\\n" }}{{- system_message }}{{- "<|eot_id|>" }}{%- for message in messages %}'
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}"
    "{{- '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)


def mistral(user, answer, system=None):
    """The templates of Mistral's instruct models are alike but for white space. system: how a system turn is said."""
    role = "" if system is None else "{% elif message['role'] == 'system' %}{{ " + system + " }}"
    return (
        "{{ bos_token }}{% for message in messages %}"
        + (ALTERNATE if system is None else "")
        + "{% if message['role'] == 'user' %}{{ "
        + user
        + " }}{% elif message['role'] == 'assistant' %}{{ "
        + answer
        + " }}"
        + role
        + "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    )


MISTRAL_V0_1 = mistral("'[INST] ' + message['content'] + ' [/INST]'", "message['content'] + eos_token + ' '")
MISTRAL_V0_2 = mistral("'[INST] ' + message['content'] + ' [/INST]'", "message['content'] + eos_token")
MISTRAL_V3 = mistral("'[INST] ' + message['content'] + '[/INST]'", "' ' + message['content']|trim + eos_token")
MISTRAL_V7 = mistral(
    "'[INST] ' + message['content'] + '[/INST]'",
    "' ' + message['content'] + eos_token",
    "'[SYSTEM_PROMPT] ' + message['content'] + '[/SYSTEM_PROMPT]'",
)
MISTRAL_NEMO = (  # the system turn goes before the last question, and is gone when that was answered
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}"
    "{%- for message in loop_messages %}{%- if message['role'] == 'user' %}"
    "{%- if loop.last and system_message is defined %}"
    "{{- '[INST]' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST]' + message['content'] + '[/INST]' }}{%- endif %}{%- elif message['role'] == 'assistant' %}"
    "{{- message['content'] + eos_token}}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    + ALTERNATE
    + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
GEMMA_3 = (  # the system turn opens the first question
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}"
    "{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}"
    + ALTERNATE
    + "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}"
    "{%- else -%}{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"
)
VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = 'A chat between a curious user and an artificial intelligence assistant.' %}{% endif %}"
    "{{ bos_token + system_message + ' ' }}{% for message in loop_messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
VICUNA_LINES = (  # as it goes round for llama.cpp and others
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'].strip() + '\\n\\n' %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = '' %}{% endif %}{% for message in loop_messages %}"
    + ALTERNATE
    + "{% if loop.index0 == 0 %}{{ bos_token + system_message }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'].strip() + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'].strip() + eos_token + '\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PHI_3 = (  # behind a conversation that is over stands the end of the text
    "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GLM_4 = (  # the next turn ends an answer
    "[gMASK]<sop>{% for message in messages %}{% if message.role == 'user' %}<|user|>"
    "{% elif message.role == 'system' %}<|system|>{% else %}<|assistant|>{% endif %}"
    "{{ '\n' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMOLLM_3 = (  # its marks cover what the prompt ends with
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}{% generation %}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}{%- else -%}"
    "{{ '<|im_start|>assistant\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}{%- endif -%}{% endgeneration %}"
    "{%- else -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}{%- else -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    "{%- endif -%}"
)

# name -> (template, its extra special tokens, does it take a system turn, the last sequence with its labels in [[ ]])
KNOWN = {
    "llama-2": (
        LLAMA_2,
        (),
        True,
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi! [/INST][[ Hello. </s>]]<s>[INST] Bye? [/INST][[ So long. </s>]]",
    ),
    "llama-3": (
        LLAMA_3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        True,
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nBye?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[So long.<|eot_id|>]]",
    ),
    "chatml": (
        CHATML,
        ("<|im_start|>", "<|im_end|>"),
        True,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello.<|im_end|>]]\n<|im_start|>user\nBye?<|im_end|>\n"
        "<|im_start|>assistant\n[[So long.<|im_end|>]]\n",
    ),
    "qwen-2.5": (
        QWEN_2_5,
        ("<|im_start|>", "<|im_end|>"),
        True,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello.<|im_end|>]]\n<|im_start|>user\nBye?<|im_end|>\n"
        "<|im_start|>assistant\n[[So long.<|im_end|>]]\n",
    ),
    "qwen-3": (
        QWEN_3,
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        True,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\nSo long.<|im_end|>]]\n",
    ),
    "phi-3": (
        PHI_3,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        True,
        "<|system|>\nBe kind.<|end|>\n<|user|>\nHi!<|end|>\n<|assistant|>\n[[Hello.<|end|>]]\n"
        "<|user|>\nBye?<|end|>\n<|assistant|>\n[[So long.<|end|>]]\n</s>",
    ),
    "glm-4": (
        GLM_4,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        True,
        "[gMASK]<sop><|system|>\nBe kind.<|user|>\nHi!<|assistant|>[[\nHello.<|user|>]]\n"
        "Bye?<|assistant|>[[\nSo long.<|user|>]]",
    ),
    "smollm-3": (
        SMOLLM_3,
        ("<|im_start|>", "<|im_end|>"),
        True,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello.<|im_end|>]]\n<|im_start|>user\nBye?<|im_end|>\n"
        "<|im_start|>assistant\n[[So long.<|im_end|>]]\n",
    ),
    "llama-3.1": (
        LLAMA_3_1,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        True,
        "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\nBe kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nBye?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[So long.<|eot_id|>]]",
    ),
    "mistral-v0.1": (
        MISTRAL_V0_1,
        (),
        False,
        "<s>[INST] Hi! [/INST][[Hello.</s>]] [INST] Bye? [/INST][[So long.</s>]] ",
    ),
    "mistral-v0.2": (
        MISTRAL_V0_2,
        (),
        False,
        "<s>[INST] Hi! [/INST][[Hello.</s>]][INST] Bye? [/INST][[So long.</s>]]",
    ),
    "mistral-v3": (
        MISTRAL_V3,
        (),
        False,
        "<s>[INST] Hi![/INST][[ Hello.</s>]][INST] Bye?[/INST][[ So long.</s>]]",
    ),
    "mistral-v7": (
        MISTRAL_V7,
        (),
        True,
        "<s>[SYSTEM_PROMPT] Be kind.[/SYSTEM_PROMPT][INST] Hi![/INST][[ Hello.</s>]]"
        "[INST] Bye?[/INST][[ So long.</s>]]",
    ),
    "mistral-nemo": (
        MISTRAL_NEMO,
        (),
        False,
        "<s>[INST]Hi![/INST][[Hello.</s>]][INST]Bye?[/INST][[So long.</s>]]",
    ),
    "gemma": (
        GEMMA,
        ("<start_of_turn>", "<end_of_turn>"),
        False,
        "<s><start_of_turn>user\nHi!<end_of_turn>\n<start_of_turn>model\n[[Hello.<end_of_turn>]]\n"
        "<start_of_turn>user\nBye?<end_of_turn>\n<start_of_turn>model\n[[So long.<end_of_turn>]]\n",
    ),
    "gemma-3": (
        GEMMA_3,
        ("<start_of_turn>", "<end_of_turn>"),
        True,
        "<s><start_of_turn>user\nBe kind.\n\nHi!<end_of_turn>\n<start_of_turn>model\n[[Hello.<end_of_turn>]]\n"
        "<start_of_turn>user\nBye?<end_of_turn>\n<start_of_turn>model\n[[So long.<end_of_turn>]]\n",
    ),
    "vicuna": (
        VICUNA,
        (),
        True,
        "<s>Be kind. USER: Hi! ASSISTANT:[[ Hello.</s>]]USER: Bye? ASSISTANT:[[ So long.</s>]]",
    ),
    "vicuna-lines": (
        VICUNA_LINES,
        (),
        True,
        "<s>Be kind.\n\nUSER: Hi!\nASSISTANT:[[ Hello.</s>]]\nUSER: Bye?\nASSISTANT:[[ So long.</s>]]\n",
    ),
}

CHANNELS = (  # as gpt-oss: a thought is shown with the last answer only, and no content may hold channels
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if '<|channel|>' in m.content %}"
    "{{ raise_exception('channels in the content') }}{% endif %}{% if m.tool_calls %}"
    "<|start|>assistant<|channel|>commentary to={{ m.tool_calls[0].function.name }}<|message|>{}<|call|>{% else %}"
    "{% if loop.last and m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHANNEL_SPECIALS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
SWITCHED = (  # as Qwen 3.5: a thought before each answer, begun by the prompt, or empty there where thinking is off
    "{%- set style = style if style is defined else 'plain' -%}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
    "{% for note in notes or [] %}{{ note }}{% endfor %}{% endif %}"
)
R1 = (  # as DeepSeek-R1: the prompt begins a thought, and no answer shows one
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'assistant' else '<u>' }}"
    "{{ m.content.split('</think>')[-1] }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><think>\n' }}{% endif %}"
)
SWITCHED_SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


def thinking(key):
    """ChatML with calls and results of tools as Qwen writes them, and thoughts under that key of a message."""
    return (
        "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.KEY %}{{ '<think>' + message.KEY + '</think>' }}{% endif %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ).replace("KEY", key)


def rendered(tokenizer, messages, tools=None, template_args=NO_ARGS):
    """Tokens and loss mask of the last of a conversation's sequences, which is the only one in most templates."""
    return render(tokenizer, Conversation("", tuple(messages), tools), template_args=template_args).sequences[-1]


def shown(tokenizer, rendered):
    """A sequence as text with its labels in [[ ]]."""
    pieces = []
    before = 0
    for token, m in [*zip(rendered.ids, rendered.mask, strict=True), (None, 0)]:
        if m != before:
            pieces.append("[[" if m else "]]")
        pieces.append("" if token is None else tokenizer.decode([token]))
        before = m
    return "".join(pieces)
