"""Renders every template beside this file with every case of cases.json, by transformers' own `apply_chat_template` code,
into golden.json, and the templates in constructs.json, which are one construct of the language each, into the same file:
`pip install transformers jinja2`, then `python tests/chat_templates/generate.py`."""

import datetime
import json
import pathlib

import jinja2
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
# The templates of a case that names none.
CHATS = ["chatml_tools", "gemma_tools", "gemma_turns", "llama_dates"]


class Clock(datetime.datetime):
    """The time that `strftime_now` writes: `NOW` in tests/chat_templates.rs."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 3, 5, 14, 7, 9)


def render(template, case):
    variables = {"bos_token": "<bos>", "eos_token": "<eos>", "enable_thinking": case.get("thinking", False)}
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[case["messages"]],
            tools=case.get("tools"),
            chat_template=template,
            add_generation_prompt=case.get("add_generation_prompt", True),
            **variables,
            **case.get("variables", {}),
        )
        return rendered[0]
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error)}


chat_template_utils.datetime = Clock
cases = json.loads((HERE / "cases.json").read_text())
golden = {}
for path in sorted(HERE.glob("*.jinja")):
    template = path.read_text()
    own = {case["name"]: case for case in cases if path.stem in case.get("templates", CHATS)}
    golden[path.stem] = {name: render(template, case) for name, case in own.items()}
(HERE / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
for template, results in golden.items():
    errors = sum(isinstance(result, dict) for result in results.values())
    print(f"{template}: {len(results)} prompts, {errors} of them refused")

constructs = json.loads((HERE / "constructs.json").read_text())
message = {"messages": [{"role": "user", "content": "Hi"}]}
rendered = {source: render(source, message) for source in constructs}
assert not any(isinstance(result, dict) for result in rendered.values()), "a construct that Jinja refuses"
(HERE / "constructs.json").write_text(json.dumps(rendered, ensure_ascii=False, indent=1) + "\n")
print(f"constructs: {len(rendered)}")
