"""pydantic-ai: objects by the answer's format and by a tool."""

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from wanted import MODEL, QUESTION, URL, Command, show

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
for output in (NativeOutput(Command), ToolOutput(Command)):
    agent = Agent(model, output_type=output, model_settings={"seed": 2, "max_tokens": 400, "temperature": 1})
    show(agent.run_sync(QUESTION).output)
