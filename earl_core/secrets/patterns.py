"""Forms of secrets in a text: keys of providers, webhooks, headers, URLs, assignments.

The forms are those that the providers publish. Maintained sets were measured and left: one that
every machine can install knows fewer of them, or alarms at each digest (`docs/security.md`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from earl_core.secrets.names import is_password_name, is_secret_name, is_secret_parameter, words_of

_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:(?!//)\S.*")


class Span(NamedTuple):
    """A secret in a text: where, and what gives it away, without it."""

    start: int
    end: int
    reason: str


def is_reference(text: str) -> bool:
    """Tell whether a text stands for a secret that is kept elsewhere (`file://` begins a URL)."""
    return _REFERENCE.fullmatch(text) is not None


# A key is at least so long, and has no such characters.
_RUN = re.compile(r"[^\s\"'<>(){}\[\],;|]{16,}")

_BODY, _LONG_BODY = re.compile(r"[\w.-]{16,}"), re.compile(r"[A-Za-z0-9]{24,}")

_KEYS = re.compile(
    r"""(?<![A-Za-z0-9_])(?:
    (?:sk|pk|rk)[-_](?=[\w-]{0,300}\d)(?:live_|test_|ant-|proj-)?[\w-]{16,}
    | [spr]k_(?:live|test)_[A-Za-z0-9]{16,}
    | hf_[A-Za-z0-9]{16,} | api_org_[A-Za-z0-9]{30,} | xai-[A-Za-z0-9]{20,}
    | pplx-[A-Za-z0-9]{20,} | fw_[A-Za-z0-9]{20,} | gsk_[A-Za-z0-9]{20,} | r8_[A-Za-z0-9]{20,}
    | nvapi-[\w-]{20,} | tgp_v1_[\w-]{30,} | tvly-(?:dev-|prod-)?[A-Za-z0-9]{20,}
    | csk-[a-z0-9]{30,} | jina_[A-Za-z0-9]{40,} | lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}
    | pcsk_[A-Za-z0-9]{4,}_[A-Za-z0-9]{30,} | wandb_v1_[\w-]{40,} | up_[A-Za-z0-9]{28,}
    | rpa_[A-Z0-9]{30,} | KGAT_[0-9a-f]{32} | bedrock-api-key-[\w+/=-]{30,}
    | ABSK[A-Za-z0-9+/]{60,}={0,2} | (?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{12,}
    | AIza[\w-]{30,} | GOCSPX-[\w-]{24,} | ya29\.[\w-]{20,} | 1//0[\w-]{30,}
    | LTAI[A-Za-z0-9]{12,} | AKID[A-Za-z0-9]{30,} | AQVN[\w-]{30,}
    | do[opr]_v1_[0-9a-f]{20,} | dapi[0-9a-f]{32}(?:-\d)? | HRKU-[\w-]{30,}
    | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{20,}
    | gl(?:pat|rt|dt|cbt|ptt|ft|imt|agent|oas|soat|ffct|wt)-[\w.-]{16,} | GR1348941[\w-]{20,}
    | ATBB[A-Za-z0-9]{20,} | (?:ATATT3|ATCTT3)[\w=-]{20,} | lin_(?:api|oauth)_[A-Za-z0-9]{30,}
    | (?:secret|ntn)_[A-Za-z0-9]{40,} | figd_[\w-]{30,} | pat[A-Za-z0-9]{14}\.[0-9a-f]{64}
    | PMAK-[0-9a-f]{24}-[0-9a-f]{34} | CFPAT-[\w-]{40,} | tfp_[\w.-]{40,}
    | shp(?:at|ca|pa|ss)_[0-9a-f]{32} | sq0(?:atp|csp|idp)-[\w-]{20,} | whsec_[A-Za-z0-9+/=]{20,}
    | SK[0-9a-f]{32} | SG\.[\w-]{16,}\.[\w-]{16,} | key-[0-9a-f]{32} | [0-9a-f]{32}-us\d{1,2}
    | xkeysib-[0-9a-f]{40,}-\w+ | re_[A-Za-z0-9]{8}_[A-Za-z0-9]{20,}
    | xox[abeoprs]-[\w-]{10,} | xoxe\.xox[bp]-[\w-]{20,} | xapp-\d-[\w-]{20,}
    | npm_[A-Za-z0-9]{20,} | pypi-[\w-]{20,} | rubygems_[0-9a-f]{40,} | cio[A-Za-z0-9]{32}
    | oy2[a-z0-9]{43} | dckr_(?:pat|oat)_[\w-]{20,} | CLOJARS_[a-z0-9]{40,} | dd[op]_\w{30,}
    | CCIPAT_\w{16,} | bkua_[a-z0-9]{30,} | sq[pua]_[0-9a-f]{40} | sgp_[\w-]{40,}
    | (?:sdk|api|mob)-[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}
    | hv[sbr]\.[\w-]{20,} | [A-Za-z0-9]{14}\.atlasv1\.[\w-]{50,} | ops_eyJ[\w-]{40,}
    | dp\.(?:pt|st|ct|sa|scim|audit)\.(?:[a-z0-9_-]+\.)?[A-Za-z0-9]{40,} | pul-[0-9a-f]{40}
    | tskey-[a-z]+-[\w-]{16,} | v1\.0-[0-9a-f]{24}-[0-9a-f]{100,} | sbp_[0-9a-f]{40}
    | sb_secret_[\w-]{20,} | nfp_[A-Za-z0-9]{30,} | vc[pciark]_[A-Za-z0-9]{24,}
    | rnd_[A-Za-z0-9]{24,} | pscale_(?:tkn|pw|oauth)_[\w.-]{30,} | napi_[a-z0-9]{40,}
    | mdb_sa_sk_[\w-]{20,} | f(?:o1|m1[ar]|m2)_[\w+/=-]{40,} | gl(?:c|sa)_[A-Za-z0-9+/=_]{32,}
    | NR(?:AK|JS|II|RA)-[\w-]{20,} | sntry[su]_[\w+/=-]{40,} | hc[abix]ik_[a-z0-9]{40,}
    | dt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{60,} | pn[ub]_[A-Za-z0-9]{20,} | rdme_[a-z0-9]{60,}
    | duffel_(?:live|test)_[\w-]{40,} | shippo_(?:live|test)_[0-9a-f]{40} | EZ[AT]K[a-z0-9]{50,}
    | rzp_(?:live|test)_[A-Za-z0-9]{14,} | FLWSECK(?:_TEST)?-[\w-]{20,}
    | access-(?:sandbox|development|production)-[0-9a-f]{8}-[0-9a-f-]{27}
    | AGE-SECRET-KEY-1[A-Z0-9]{50,} | AGE-PLUGIN-[A-Z0-9-]{1,60}-1[A-Z0-9]{20,}
    | AKCp[A-Za-z0-9]{60,} | e2b_[0-9a-f]{40} | fc-[0-9a-f]{32}
    | EAA[A-Za-z0-9]{40,} | sl\.[\w-]{60,} | flp_[A-Za-z0-9]{30,} | nk-[\w-]{40,}
    | [0-9a-f]{32}\.(?=[A-Za-z]*\d)(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{16}(?![\w.])
    | [\w.]{2}[A-Za-z0-9]\dQ~[\w~.-]{31,40}
    | [MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,45}(?![\w-])
    | \d{8,10}:[\w-]{34,36}(?![\w-])
    | eyJ[\w-]{6,600}\.[\w-]{6,}\.[\w-]*(?:\.[\w-]+\.[\w-]+)?
    )""",
    re.VERBOSE,
)

# What providers call their answers, calls and files is as random as their keys, and no secret.
_UNKNOWN = re.compile(
    r"(?<![\w/.+-])(?!(?:call|toolu|chatcmpl|cmpl|msg|resp|req|run|step|thread|asst|file|batch|gen|vs|fc"
    r"|rs|org|user|proj|srvtoolu|ftjob)[-_])[A-Za-z][A-Za-z0-9]{1,11}(?:[-_.][a-z0-9]{1,8}){0,3}[-_.]"
    r"([A-Za-z0-9]{24,})(?![\w/+=-])"
)
_DIGIT_RUNS = re.compile(r"\d+")

_HOOKS = re.compile(
    r"""(?:
    hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[\w/-]{10,}
    | discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+/[\w-]{20,}
    | \.webhook\.office\.com/webhookb?2?/[\w@/-]{20,}
    | outlook\.office(?:365)?\.com/webhook/[\w@/-]{20,}
    | hooks\.zapier\.com/hooks/catch/[\w/]{8,} | hooks\.chime\.aws/incomingwebhooks/\S{20,}
    | maker\.ifttt\.com/trigger/[\w-]+/(?:json/)?with/key/[\w-]{10,}
    | open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook/[\w-]{20,}
    | hook\.(?:\w{1,9}\.)?(?:integromat|make)\.com/\w{20,} | /hooks/[a-z0-9]{26}(?![\w/])
    | api\.telegram\.org/(?:file/)?bot\d+:[\w-]{20,}
    )""",
    re.VERBOSE,
)

_BLOCKS = re.compile(
    r"-{4,5} ?BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)? ?-{4,5}.*?"
    r"(?:-{4,5} ?END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)? ?-{4,5}|\Z)"
    r"|PuTTY-User-Key-File-\d:.*?(?:Private-MAC: ?\w+|\Z)",
    re.DOTALL,
)

_USERINFO = re.compile(r"(?<=://)[^\s/?#:@]*:[^\s/?#]+(?=@)")
_LONE_USER = re.compile(r"(?<=://)[^\s/?#:@]{20,}(?=@)")
_PARAMETER = re.compile(r"[?&;#]([\w.%-]+)=([^&;#\s\"']+)")

# Without one of these in its line no name of a secret is there.
_TELLING = ("pass", "pwd", "pw", "secret", "cred", "auth", "bearer", "basic", "jwt", "key", "token",
            "cookie", "connection")  # fmt: skip
_HEADER = re.compile(
    r"(?i)(?:(?:\b(?:proxy-)?authorization[\"']?\s*:|\bx-api-key\s*:|\b(?:bearer|basic)\b)\s*"
    r"[\"']?(?:(?:bearer|basic|token|digest)\s+)?)((?=\S{0,300}\d)[\w.~+/=:-]{8,})"
)
_AUTHORIZED = re.compile(
    r"(?i)\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token|digest)\s+([\w.~+/=:-]{6,})"
)
_COOKIE = re.compile(r"(?i)\b(?:set-)?cookie[\"']?\s*:\s*[\"']?([^\s\"'=]{1,200}=[^\"'\n]{4,})")
_HEADERS = (
    (_AUTHORIZED, ("authorization",)),
    (_HEADER, ("authorization", "x-api-key", "bearer", "basic")),
    (_COOKIE, ("cookie",)),
)
"""Patterns of headers, each with the words without one of which there is none."""
_NAMED = re.compile(
    r"(?:^|(?<=[\s\"',;{(\[\\]))-{0,2}([A-Za-z_][\w.-]*)\\?[\"']?( ?[:=] *)"
    r"(?:\\?\"([^\"\\\n]{3,})|\\?'([^'\\\n]{3,})|([^\s\"',;]{3,}))",
    re.MULTILINE,
)
_FLAG = re.compile(r"(?<!\S)--([A-Za-z][\w-]*)( +)[\"']?([^\s\"'-][^\s\"']{2,})")
_COMMANDS = re.compile(
    r"\b(?:curl|wget|xh|httpie)\b[^\n]{0,300}?\s(?:-u|-U|--user|--proxy-user)[ =]?[\"']?"
    r"[^\s:\"']+:([^\s\"']+)"
    r"|\b(?:sshpass|docker\s+login\b[^\n]{0,200}?)\s+-p\s*(\S+)|\bmysql\w{0,9}\b[^\n]{0,300}?\s-p([^\s-]\S{3,})"
    r"|(?:\bmachine\s+\S+|\blogin\s+\S+)\s+(?:login\s+\S+\s+)?password\s+(\S+)"
)

_PLACEHOLDER = re.compile(
    r"<[^>]*>|\{+[^}]*\}+|\$\{?[A-Za-z_][\w.]*\}?|\$\(.*|\*+|\(hidden\)|x{4,}|\.\.\..*"
    r"|(?i:none|null|true|false|anon|anonymous|str|bytes|string|secretstr|required|optional|unset|missing|empty"
    r"|hidden|redacted|unknown|enabled|disabled)"
)
_NUMBER = re.compile(r"[-+]?[\d.,]+(?:e[-+]?\d+)?(?:%|[a-z/]{1,4})?", re.IGNORECASE)
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/(?![^/]*[A-Z][^/]*\d|[^/]*\d[^/]*[A-Z])[\w.+-]+)+/?")
_CODE = re.compile(r"[\w.]*\w[(\[].*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_STRONG = re.compile(r"(?=.*[A-Za-z])(?=.*[\d!@#$%^&*+?~])\S{6,}")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~-]{20,}")
_RANDOM_BITS = 3.5

_KEY = "it looks like a key"


def is_placeholder(text: str) -> bool:
    """Tell whether it stands where a secret would, as `<key>` and `${KEY}` do."""
    return _PLACEHOLDER.fullmatch(text) is not None


def password_of(url: str) -> str | None:
    """The `user:password` of a URL that has one."""
    match = _USERINFO.search(url)
    return None if match is None else match[0]


def looks_random(text: str) -> bool:
    """Tell whether nobody would have chosen such a word."""
    if not _RANDOM.fullmatch(text):
        return False
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares) >= _RANDOM_BITS


def secrets_in(text: str) -> Iterator[Span]:
    """Everything in a text that is a secret by its form; they may overlap."""
    for run in _RUN.finditer(text):
        if _BODY.search(text, *run.span()):
            for match in _KEYS.finditer(text, *run.span()):
                yield Span(*match.span(), _KEY)
            if _LONG_BODY.search(text, *run.span()):
                for match in _UNKNOWN.finditer(text, *run.span()):
                    if _is_drawn(match[1]):
                        yield Span(*match.span(), _KEY)
    if "hook" in text or "ifttt" in text or "telegram" in text:
        for match in _HOOKS.finditer(text):
            yield Span(*match.span(), "whoever has this address may write there")
    if "PRIVATE KEY" in text or "PuTTY" in text:
        for match in _BLOCKS.finditer(text):
            yield Span(*match.span(), _KEY)
    if "://" in text:
        yield from _in_urls(text)
    yield from _in_commands(text)
    start = 0
    for line in text.splitlines(keepends=True):
        lower = line.lower()
        if any(word in lower for word in _TELLING):
            for span in _named(line, lower):
                yield Span(start + span.start, start + span.end, span.reason)
        start += len(line)


def _is_drawn(text: str) -> bool:
    runs = len(_DIGIT_RUNS.findall(text))
    return runs >= 3 and not text.isupper() and not text.islower() and looks_random(text)


def _in_urls(text: str) -> Iterator[Span]:
    for match in _USERINFO.finditer(text):
        yield Span(*match.span(), "it is a URL with a password")
    for match in _LONE_USER.finditer(text):
        if looks_random(match[0]):
            yield Span(*match.span(), "it is a URL with a password")
    for match in _PARAMETER.finditer(text):
        if is_secret_parameter(match[1]) and not is_placeholder(match[2]):
            yield Span(*match.span(2), f"the URL's parameter `{match[1]}` is a secret")


def _in_commands(text: str) -> Iterator[Span]:
    if any(word in text for word in ("curl", "wget", "xh", "httpie", "sshpass", "mysql", "login")):
        for match in _COMMANDS.finditer(text):
            group = match.lastindex or 0
            if not is_placeholder(match[group]):
                yield Span(*match.span(group), "a command is given a password")


def _named(line: str, lower: str) -> Iterator[Span]:
    for pattern, words in _HEADERS:
        if any(word in lower for word in words):
            for match in pattern.finditer(line):
                yield Span(*match.span(1), "it looks like a header that lets in")
    for match in (*_NAMED.finditer(line), *_FLAG.finditer(line)):
        if is_secret_name(match[1]) and _is_given(match, line):
            yield Span(*match.span(match.lastindex or 0), f"it gives `{match[1]}` a value")


def _is_given(match: re.Match[str], line: str) -> bool:
    """Tell whether the text after a name is its value, and not the next word of a sentence."""
    name, between = match[1], match[2].strip()
    value, quoted = match[match.lastindex or 0], match.re is _NAMED and match[5] is None
    if is_placeholder(value) or is_reference(value):
        return False
    if _PATH.fullmatch(value) and (not is_password_name(name) or words_of(name)[-1] == "pwd"):
        return False
    if match[2] == "=":
        return quoted or len(value) > 3
    if _NUMBER.fullmatch(value):
        return between == ":" and is_password_name(name)
    if not between:  # a flag's
        return True
    if words_of(name) == ("token",):  # a model's, most of all
        return looks_random(value)
    if match[2] == ":" and not quoted and value.isidentifier():  # an import path, but for these
        return is_password_name(name) and "." not in name and _STRONG.fullmatch(value) is not None
    if quoted or "-" in name.strip("-"):  # a header's
        return True
    if _STRONG.fullmatch(value) and not _CODE.fullmatch(value):
        return True
    alone = not line[: match.start()].strip() and not line[match.end() :].strip()
    return between == ":" and alone
