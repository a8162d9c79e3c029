"""instructor, in three of its modes."""

import instructor
import openai
from wanted import MODEL, QUESTION, URL, Command, show

asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "seed": 5, "max_tokens": 300}
# In mode JSON the schema is only in the prompt, which this model does not heed: the server is told of it too.
told = {"extra_body": {"response_format": {"type": "json_object", "schema": Command.model_json_schema()}}}
for mode, more in (("TOOLS", {}), ("JSON", told), ("JSON_SCHEMA", {})):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=getattr(instructor.Mode, mode))
    show(client.chat.completions.create(response_model=Command, max_retries=0, **asked, **more))
