const PALETTE = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
const OUTCOMES = ["win", "draw", "loss", "illegal"];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The colour of a series: outcomes have their own, whichever chart they are in. */
const colourOf = (series, number) =>
  colour(OUTCOMES.includes(series.name) ? series.name : PALETTE[number % PALETTE.length]);

const faded = (hex) => `${hex}30`;

function lines(chart) {
  const traces = [];
  chart.series.forEach((series, number) => {
    const tint = colourOf(series, number);
    const few = series.x.length < 60;
    const trace = {
      name: series.name, x: series.x, y: series.y, type: "scatter", legendgroup: String(number),
      mode: few ? "lines+markers" : "lines", line: { color: tint, width: 2 },
      marker: { color: tint, size: 6, symbol: series.held_out ? "diamond" : "circle" },
    };
    if (series.low && (series.held_out || series.x.length === 1)) {
      trace.error_y = {
        type: "data", symmetric: false, color: tint, thickness: 1.2, width: 3,
        array: series.high.map((high, i) => high - series.y[i]),
        arrayminus: series.low.map((low, i) => series.y[i] - low),
      };
    } else if (series.low) {
      const edge = {
        x: series.x, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip",
        showlegend: false, legendgroup: String(number),
      };
      traces.push({ ...edge, y: series.low },
        { ...edge, y: series.high, fill: "tonexty", fillcolor: faded(tint) });
    }
    traces.push(trace);
  });
  return traces;
}

const bars = (chart) => chart.series.map((series, number) => (
  { name: series.name, x: series.x, y: series.y, type: "bar", marker: { color: colourOf(series, number) } }));

function frame(chart) {
  const axis = {
    color: colour("quiet"), gridcolor: colour("line"), zerolinecolor: colour("line"),
    automargin: true,
  };
  const xs = chart.series.flatMap((series) => series.x);
  const last = xs.reduce((most, x) => Math.max(most, x), 0);
  const positive = chart.log ? chart.series.flatMap((series) => series.y).filter((y) => y > 0) : [];
  const decades = Math.log10(Math.max(...positive) / Math.min(...positive));
  return {
    margin: { l: 10, r: 10, t: 8, b: 10 }, barmode: "stack", bargap: 0.15, hovermode: "x unified",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("text"), size: 12 },
    hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("line"), font: { color: colour("text") } },
    showlegend: chart.series.length > 1 || chart.series.some((series) => series.low),
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    xaxis: { ...axis, title: { text: "iteration" }, tickformat: "d", dtick: last < 8 ? 1 : undefined,
      range: [-0.5, last + 0.5] },
    yaxis: { ...axis, title: { text: chart.y }, type: chart.log ? "log" : "linear",
      ...(chart.log ? { dtick: decades > 2.5 ? 1 : "D2" } : {}),
      rangemode: chart.kind === "bars" ? "tozero" : "normal", exponentformat: "power",
      ...(chart.y.includes("%") ? { range: [-3, 103] } : {}) },
    shapes: (chart.marks ?? []).map((x) => (
      { type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1,
        line: { color: colour("quiet"), width: 1, dash: "dot" } })),
  };
}

/** Each stage as a lane, in which the colour changes with the stage deployment. */
function lanes() {
  const stages = [...new Set(data.spans.map((each) => each.stage))];
  const number = {};
  const tints = data.spans.map((each) => {
    number[each.stage] = (number[each.stage] ?? -1) + 1;
    return colour(PALETTE[number[each.stage] % PALETTE.length]);
  });
  const trace = {
    type: "bar", orientation: "h", y: data.spans.map((each) => each.stage), width: 0.55,
    base: data.spans.map((each) => each.first - 0.5),
    x: data.spans.map((each) => each.last - each.first + 1), marker: { color: tints },
    text: data.spans.map((each) => `${each.deployment} (${span(each.first, each.last)})`),
    textposition: "none", hoverinfo: "text",
  };
  const chart = { y: "", series: [{ x: [Math.max(...data.spans.map((each) => each.last))] }] };
  const layout = frame(chart);
  layout.hovermode = "closest";
  layout.barmode = "overlay";
  layout.showlegend = false;
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: stages.reverse(), title: { text: "" } };
  return [[trace], layout];
}

/** Engines and ranks as lanes over time; a stage has one colour, a wait is faded. */
function strip() {
  const spans = data.occupancy.spans;
  const names = [...new Set(spans.map((each) => each.lane))];
  const stages = [...new Set(spans.map((each) => each.stage).filter((stage) => stage))];
  const tint = (stage) => colour(PALETTE[stages.indexOf(stage) % PALETTE.length]);
  const traces = [...stages, ""].map((stage) => {
    const own = spans.filter((each) => each.stage === stage);
    return {
      name: stage || "waits", type: "bar", orientation: "h", width: stage ? 0.6 : 0.2,
      y: own.map((each) => each.lane), base: own.map((each) => each.begin), x: own.map((each) => each.length),
      marker: { color: stage ? tint(stage) : colour("quiet") }, text: own.map((each) => each.text),
      textposition: "none", hoverinfo: "text",
    };
  });
  const layout = frame({ y: "", series: traces });
  layout.hovermode = "closest";
  layout.barmode = "overlay";
  layout.xaxis = { ...layout.xaxis, title: { text: "seconds" }, tickformat: "", dtick: undefined, range: undefined };
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: names.reverse(), title: { text: "" } };
  return [traces, layout];
}

const OPTIONS = { responsive: true, displaylogo: false, displayModeBar: false, plotlyServerURL: "" };

/** All of them, wherever the page is scrolled to: a print and a screenshot have them, too. */
function drawAll() {
  for (const plot of document.querySelectorAll(".plot")) Plotly.react(plot, ...plot.build(), OPTIONS);
}

function place(figure, title, build) {
  const plot = make("div", { className: "plot", role: "img", "aria-label": title });
  plot.build = build;
  figure.append(plot);
}

function showCharts() {
  for (const section of data.sections) {
    const grid = make("div", { className: "grid" });
    for (const chart of section.charts) {
      const figure = make("figure", {}, make("h3", {}, chart.title));
      const marked = (chart.marks ?? []).length > 0;
      const intervals = chart.series.some((series) => series.low);
      const notes = [
        ...(intervals ? ["Bands and bars are 95 % intervals."] : []),
        ...(marked ? ["Dotted lines: a stage deployment switched."] : []),
      ];
      place(figure, `${chart.title}: ${chart.y} over iterations`,
        () => [chart.kind === "bars" ? bars(chart) : lines(chart), frame(chart)]);
      if (notes.length) figure.append(make("figcaption", { className: "quiet" }, notes.join(" ")));
      grid.append(figure);
    }
    const id = `charts-${section.title.toLowerCase().replaceAll(" ", "-")}`;
    at("charts").append(make("section", { id }, make("h2", {}, section.title), grid));
  }
  if (data.spans.length) {
    place(at("lanes"), "Stage deployments over iterations", lanes);
    at("lanes").append(make("figcaption", { className: "quiet" }, "The colour changes where the stage deployment does."));
  }
  if (data.occupancy.spans.length) {
    place(at("strip"), "Engines and ranks over time", strip);
    at("strip").append(make("figcaption", { className: "quiet" }, "By the ledger of the last attempt. Thin bars are waits: point at one to see for whom."));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
}
