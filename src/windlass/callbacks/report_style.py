"""The style sheet of `report.html`. Colours are variables, so that light and dark differ in one place."""

# The part that charts need; each rule ends its line.
CHART_STYLE = """\
figcaption {
  font-weight: 600; display: flex; flex-wrap: wrap; gap: 4px 16px;
  justify-content: space-between; margin-bottom: 6px;
}
.legend { font-weight: 400; font-size: 13px; color: var(--soft); display: flex; flex-wrap: wrap; gap: 4px 14px; }
.key::before {
  content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px;
  margin-right: 6px; vertical-align: middle; background: var(--c);
}
svg { display: block; width: 100%; height: auto; font-size: 11.5px; }
svg text { fill: var(--faint); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); }
.axis { stroke: var(--axis); }
polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
.spot { fill: transparent; }
.spot:hover { fill: var(--c); }
.s0 { --c: var(--c0); }
.s1 { --c: var(--c1); }
.s2 { --c: var(--c2); }
.s3 { --c: var(--c3); }
.s4 { --c: var(--c4); }
.s5 { --c: var(--c5); }
"""

STYLE = (
    """
:root {
  color-scheme: light dark;
  --page: #f4f4f2; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --faint: #7d7c77;
  --line: #e1e0d9; --axis: #c3c2b7;
  --c0: #2a78d6; --c1: #eb6834; --c2: #1baf7a; --c3: #eda100; --c4: #e87ba4; --c5: #4a3aa7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d0d0d; --card: #1a1a19; --ink: #f4f4f2; --soft: #c3c2b7; --faint: #96958e;
    --line: #2c2c2a; --axis: #4a4a47;
    --c0: #3987e5; --c1: #d95926; --c2: #199e70; --c3: #c98500; --c4: #d55181; --c5: #9085e9;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 32px 24px 56px; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 36px 0 12px; }
.muted { color: var(--faint); }
.sub { color: var(--soft); margin: 0 0 24px; }

.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; margin: 0; overflow-x: auto;
}
.grid-2 { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.columns { columns: 2 460px; column-gap: 16px; }
.columns > .card { break-inside: avoid; margin-bottom: 16px; }

.tiles {
  display: grid; gap: 12px; margin-bottom: 16px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
}
.tile .label { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 600; line-height: 1.3; }
.tile .more { color: var(--faint); font-size: 12.5px; }

"""
    + CHART_STYLE
    + """
table { border-collapse: collapse; width: 100%; font-size: 14px; }
caption { text-align: left; font-weight: 600; margin-bottom: 6px; }
th, td {
  text-align: left; padding: 5px 12px 5px 0; border-top: 1px solid var(--line); vertical-align: top;
}
td { overflow-wrap: anywhere; white-space: pre-wrap; }
thead th { color: var(--soft); font-weight: 500; border-top: 0; white-space: nowrap; }
tbody th { font-weight: 400; color: var(--soft); white-space: nowrap; }
.num { font-variant-numeric: tabular-nums; }
.wide td { white-space: nowrap; }
"""
)
