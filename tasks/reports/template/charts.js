const PALETTE = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
const OUTCOMES = ["win", "draw", "loss", "illegal"];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The colour of a series: outcomes have their own, whichever chart they are in, and so have runs. */
const colourOf = (series, number) =>
  colour(OUTCOMES.includes(series.name) ? series.name : PALETTE[(series.run ?? number) % PALETTE.length]);

/** 95 % intervals as bars that end in a line. */
const errorBars = (series, tint) => ({
  type: "data", symmetric: false, color: tint, thickness: 1.2, width: 3,
  array: series.high.map((high, i) => high - series.y[i]),
  arrayminus: series.low.map((low, i) => series.y[i] - low),
});

const faded = (hex) => `${hex}30`;

function lines(chart) {
  const traces = [];
  chart.series.forEach((series, number) => {
    const tint = colourOf(series, number);
    const few = series.x.length < 60;
    const trace = {
      name: series.name, x: series.x, y: series.y, type: "scatter", legendgroup: String(number),
      mode: few || series.held_out ? "lines+markers" : "lines",
      // Beside a run's training in the same colour.
      line: { color: tint, width: 2, dash: series.held_out && series.run !== undefined ? "dot" : "solid" },
      marker: { color: tint, size: 6, symbol: series.held_out ? "diamond" : "circle" },
    };
    if (series.low && (series.held_out || series.x.length === 1)) {
      trace.error_y = errorBars(series, tint);
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

/** Bars beside each other, one group for each name. */
const grouped = (chart) => chart.series.map((series, number) => {
  const tint = colourOf(series, number);
  return {
    name: series.name, x: series.x, y: series.y, type: "bar", marker: { color: tint },
    error_y: errorBars(series, colour("text")),
  };
});

const DRAWN = { bars, categories: grouped, lines };

function frame(chart) {
  const named = chart.kind === "categories";
  const axis = {
    color: colour("quiet"), gridcolor: colour("line"), zerolinecolor: colour("line"),
    automargin: true,
  };
  const xs = named ? [] : chart.series.flatMap((series) => series.x);
  const last = xs.reduce((most, x) => Math.max(most, x), 0);
  const positive = chart.log ? chart.series.flatMap((series) => series.y).filter((y) => y > 0) : [];
  const decades = Math.log10(Math.max(...positive) / Math.min(...positive));
  return {
    margin: { l: 10, r: 10, t: 8, b: 10 }, barmode: named ? "group" : "stack", bargap: 0.15, hovermode: "x unified",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("text"), size: 12 },
    hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("line"), font: { color: colour("text") } },
    showlegend: chart.series.length > 1 || chart.series.some((series) => series.low),
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    xaxis: named ? { ...axis, type: "category" } : { ...axis, title: { text: "iteration" }, tickformat: "d",
      dtick: last < 8 ? 1 : undefined, range: [-0.5, last + 0.5] },
    yaxis: { ...axis, title: { text: chart.y }, type: chart.log ? "log" : "linear",
      // Between powers of ten plotly writes digits alone: "5" may be the only label.
      ...(!chart.log ? {} : decades > 2.5 ? { dtick: 1 } : { dtick: "D2", tickformat: ".0e" }),
      rangemode: chart.kind === "lines" ? "normal" : "tozero", exponentformat: "power",
      ...(chart.y.includes("%") ? { range: [-3, 103] } : {}) },
    shapes: (chart.marks ?? []).map((x) => (
      { type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1,
        line: { color: colour("quiet"), width: 1, dash: "dot" } })),
  };
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

/** A figure for each chart of the sections. */
function placeSections() {
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
      place(figure, `${chart.title}: ${chart.y}${chart.kind === "categories" ? "" : " over iterations"}`,
        () => [DRAWN[chart.kind](chart), frame(chart)]);
      if (notes.length) figure.append(make("figcaption", { className: "quiet" }, notes.join(" ")));
      grid.append(figure);
    }
    const id = `charts-${section.title.toLowerCase().replaceAll(" ", "-")}`;
    at("charts").append(make("section", { id }, make("h2", {}, section.title), grid));
  }
}

/** Draw what was placed, and again in other colours. */
function draw() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
}
