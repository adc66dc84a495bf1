"""An HTTP endpoint in OpenAI's form in front of an engine, which records what agents are told."""
