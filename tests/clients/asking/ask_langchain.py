"""langchain-openai, through both of OpenAI's APIs: texts, objects, tools."""

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from wanted import MODEL, QUESTION, URL, Command, show

asked = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(**asked, temperature=0, max_tokens=24)
text = chat.invoke(QUESTION).content
assert text
assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == text
responses = ChatOpenAI(**asked, temperature=0, max_tokens=24, use_responses_api=True)
assert responses.invoke(QUESTION).content[0]["text"] == text

llm = ChatOpenAI(**asked, temperature=1, seed=3, max_tokens=300)
for method in ("json_schema", "function_calling"):
    show(llm.with_structured_output(Command, method=method).invoke(QUESTION))
brief = llm.model_copy(update={"seed": 1})  # in this mode nothing but luck keeps this model from going on
assert isinstance(brief.with_structured_output(method="json_mode", schema=None).invoke(QUESTION), dict)


@tool
def weather(city: Literal["Rome", "Oslo"], days: int) -> str:
    """Tells the weather."""
    return f"Sunny in {city}."


answer = llm.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION)
(call,) = answer.tool_calls
assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
history = [("user", QUESTION), answer, weather.invoke(call)]
assert llm.bind_tools([weather]).invoke(history).content is not None
chunks = list(llm.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).stream(QUESTION))
whole = chunks[0]
for chunk in chunks[1:]:
    whole = whole + chunk
assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
