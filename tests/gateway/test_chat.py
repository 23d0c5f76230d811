"""Chat templates as transformers renders them."""

import pytest

from services.gateway.call import Chat
from services.gateway.chat import ChatTemplate
from services.gateway.tokenizer import ChatFormat, load_tokenizer
from shared.errors import InvalidField, StartError
from shared.model_source import find_model

USER = {"role": "user", "content": "Hi <b>&"}


def render(template: str, *messages, **special) -> str:
    return ChatTemplate(ChatFormat(template, special)).render(Chat(messages or (USER,)))


def test_special_tokens_and_generation_prompt_are_there() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}|{% endif %}"
    assert render(template, bos_token="<s>") == "<s>Hi <b>&|"


def test_blocks_are_trimmed_and_loops_can_break() -> None:
    template = (
        "{% for m in messages %}\n  {% if loop.index0 %}{% break %}{% endif %}\n"
        "{{ m.role }}\n{% endfor %}"
    )
    assert render(template, USER, USER) == "user\n"


def test_tojson_does_not_escape_html() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b>&"}'


def test_generation_blocks_are_just_text() -> None:
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}") == "user"


def test_the_time_can_be_asked() -> None:
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_what_a_template_refuses_is_the_clients_error() -> None:
    with pytest.raises(InvalidField, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0]['content'] + 1 }}", "{{ messages[7].content.x }}", "{{ 1 / 0 }}", "", "{# #}"],
)
def test_a_template_that_fails_is_refused_not_a_crash(template: str) -> None:
    with pytest.raises(InvalidField):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(InvalidField):
        render(template)


def test_a_template_that_is_none_is_a_start_error() -> None:
    with pytest.raises(StartError, match="chat template"):
        ChatTemplate(ChatFormat("{% for %}", {})).check()


@pytest.mark.model
def test_the_real_template_over_several_turns() -> None:
    template = ChatTemplate(load_tokenizer(find_model("smollm2-135m-instruct")).chat)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    assert template.render(Chat(tuple(messages))) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(Chat(tuple(messages[1:2]))).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )


@pytest.mark.model
def test_the_real_template_as_transformers_renders_it() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = load_tokenizer(find_model("smollm2-135m-instruct")).chat
    messages = [USER, {"role": "assistant", "content": " x\n"}, USER]
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=chat.template, add_generation_prompt=True, **chat.special_tokens
    )
    assert ChatTemplate(chat).render(Chat(tuple(messages))) == theirs


# ------------------------------------------------------------------ where the prompt ends

MARKED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
PROMPTING = MARKED + "{% if add_generation_prompt %}<assistant>{% endif %}"


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def prompt_of(template: str, *messages: dict[str, str], **options: bool) -> str:
    return ChatTemplate(ChatFormat(template, {})).render(Chat(messages, **options))


def test_the_generation_prompt_can_be_left_out() -> None:
    user = {"role": "user", "content": "Hi"}
    assert prompt_of(PROMPTING, user, add_generation_prompt=False) == "<user>Hi</>"
    assert prompt_of(PROMPTING, user, add_generation_prompt=True) == "<user>Hi</><assistant>"


CONTINUED = ["Sure", "Sure, ", "", "  two\n\n", "</>", "Hi <b>&", "a CONTINUE_FINAL_MESSAGE_TAG b"]


@pytest.mark.parametrize("text", CONTINUED, ids=repr)
@pytest.mark.parametrize("template", [MARKED, TRIMMED], ids=["as it is", "trimmed"])
def test_a_final_message_is_continued_as_in_transformers(template: str, text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [USER, assistant("earlier"), USER, assistant(text)]
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=template, continue_final_message=True
    )
    ours = prompt_of(template, *messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == theirs
    assert ours.rstrip().endswith(text.strip())


def test_a_template_without_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidField, match="leaves the last message out") as caught:
        prompt_of("x", USER, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.model
@pytest.mark.parametrize("text", CONTINUED, ids=repr)
def test_the_real_template_continues_as_in_transformers(text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = load_tokenizer(find_model("smollm2-135m-instruct")).chat
    messages = [USER, assistant(text)]
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=chat.template, continue_final_message=True, **chat.special_tokens
    )
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(chat).render(Chat(tuple(messages), **options)) == theirs
