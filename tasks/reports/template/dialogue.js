const CALLS = data.tools.map((pattern) => new RegExp(pattern, "g"));
const STEPS = [-0.05, -0.25, -0.7, -1.5, -3];
let asTokens = false;

const share = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;

/** The class of a log-prob's colour; p0 is the surest. */
const shade = (logprob) => {
  const found = STEPS.findIndex((step) => logprob >= step);
  return `p${found < 0 ? STEPS.length : found}`;
};

/** Where calls of tools stand in an answer: pairs of start and end. */
function callsIn(text) {
  for (const pattern of CALLS) {
    const found = [...text.matchAll(pattern)].filter((match) => match[0].length);
    if (found.length) return found.map((match) => [match.index, match.index + match[0].length]);
  }
  return [];
}

function answerText(text) {
  const body = make("pre");
  let done = 0;
  for (const [start, end] of callsIn(text)) {
    body.append(text.slice(done, start),
      make("span", { className: "call", title: "call of a tool" }, text.slice(start, end)));
    done = end;
  }
  body.append(text.slice(done));
  return body;
}

const turnBox = (kind, who, body) =>
  make("div", { className: `turn ${kind}` }, make("p", { className: "who" }, who), body);

function textTurns(texts, rewards) {
  const boxes = [];
  let called = false;
  rewards.forEach((reward, turn) => {
    boxes.push(turnBox("world", called ? "tool" : "environment", make("pre", {}, texts[2 * turn])));
    const answer = texts[2 * turn + 1];
    called = callsIn(answer).length > 0;
    boxes.push(turnBox("model", `model, turn ${turn + 1}${reward === null ? "" : `, reward ${reward}`}`, answerText(answer)));
  });
  const closing = texts.slice(2 * rewards.length).join("");
  if (closing) boxes.push(turnBox("world", "environment, at the end", make("pre", {}, closing)));
  return boxes;
}

/** The tokens of a sample, turn by turn. */
function tokenTurns(sample, vocabulary, first) {
  const texts = sample.i.map((place) => vocabulary[place][1]);
  for (const [place, text] of sample.o) texts[place] = text;
  const logprobs = new Map();
  let number = 0;
  for (const [start, length] of sample.m) {
    for (let place = start; place < start + length; place += 1) logprobs.set(place, sample.l[number++] / 100);
  }
  return sample.s.map((start, turn) => {
    const end = sample.s[turn + 1] ?? texts.length;
    const body = make("pre");
    for (let place = start; place < end; place += 1) {
      const logprob = logprobs.get(place);
      const id = vocabulary[sample.i[place]][0];
      const trained = logprob !== undefined;
      body.append(make("span", {
        className: trained ? `token trained ${shade(logprob)}` : "token given",
        title: trained ? `token ${id}, log-prob ${logprob} (${share(logprob)})` : `token ${id}, given`,
      }, texts[place]));
    }
    return turnBox("tokens", `turn ${first + turn + 1}, ${end - start} tokens`, body);
  });
}

function sampleTurns(samples, vocabulary) {
  let first = 0;
  return samples.flatMap((sample, number) => {
    const turns = tokenTurns(sample, vocabulary, first);
    first += sample.s.length;
    return samples.length > 1 ? [make("h4", {}, `Sample ${number + 1}`), ...turns] : turns;
  });
}

function legend() {
  const names = ["≥ 95 %", "≥ 78 %", "≥ 50 %", "≥ 22 %", "≥ 5 %", "less"];
  return make("p", { className: "quiet legend" }, "Underlined: sampled by the policy and trained (loss mask 1), coloured by its probability ",
    ...names.flatMap((name, number) => [make("span", { className: `p${number}` }, name), " "]),
    "Grey: given (loss mask 0).");
}

const decoded = new Map();

/** A part's texts or tokens, decoded once. */
function part(kind, number) {
  const id = `${kind}-${number}`;
  if (!decoded.has(id)) decoded.set(id, decode(id));
  return decoded.get(id);
}

async function dialogueOf(episode) {
  if (episode.shown === 0) return [make("p", {}, "The text of this episode is not in the page: it has a bounded size.")];
  if (asTokens && episode.shown > 1) {
    const found = await part("tokens", episode.part);
    const samples = found.samples[episode.place];
    if (samples) return [legend(), ...sampleTurns(samples, found.vocabulary)];
    return [make("p", {}, "The tokens of this episode are left out: they hold a secret.")];
  }
  const found = await part("texts", episode.part);
  const scores = found.scores[episode.place];
  return [
    ...(asTokens ? [make("p", {}, "The tokens of this episode are not in the page.")] : []),
    ...textTurns(found.texts[episode.place], found.rewards[episode.place]),
    ...(scores && scores !== "{}" ? [make("p", { className: "quiet" }, `reward functions: ${scores}`)] : []),
  ];
}
