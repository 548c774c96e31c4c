"""How the page of a plan looks, and the search in its table of inputs."""

# A phone shows a page in its own width.
VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'

STYLE = """
:root { color-scheme: light dark; --text: #1d2433; --soft: #5a6578; --back: #fff;
  --line: #e3e7ee; --card: #f6f8fb; --compute: #4c78a8; --sent: #e4893b;
  --saved: #54a24b; --warn: #9a4b00; --warn-back: #fff4e5; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #a3adbd;
  --back: #14181f; --line: #323a47; --card: #1d232d; --compute: #6f9bd1;
  --sent: #f0a35e; --saved: #7cc274; --warn: #ffc98a; --warn-back: #3a2a16; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--back); margin: 1.5rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
td { font-family: ui-monospace, monospace; overflow-wrap: break-word; }
.figures { display: grid; gap: .7rem;
  grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
.figure { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: .5rem .8rem; }
.figure b { display: block; font-size: 1.15rem; }
.figure span { color: var(--soft); }
.verdict { font-size: 1.15rem; margin: .6rem 0 1rem; }
.idle { background: var(--warn-back); color: var(--warn); border-radius: 8px;
  padding: .5rem .8rem; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content;
  gap: .25rem .6rem; align-items: center; font-size: 13px; }
.bars i { display: block; height: 1rem; border-radius: 2px; min-width: 1px; }
.compute { background: var(--compute); } .sent { background: var(--sent); }
.saved { background: var(--saved); }
@media (max-width: 30rem) {
  body { margin: .8rem auto; padding: 0 .7rem; }
  table { font-size: 12px; } th, td { padding: .2rem .35rem; }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem; }
  .figure { padding: .4rem .5rem; overflow-wrap: anywhere; }
  .figure b { font-size: 1rem; }
  .bars { grid-template-columns: minmax(0, 1fr) max-content; }
  .bars i { grid-column: 1 / -1; grid-row: auto; } }
.picture { overflow-x: auto; }
summary { cursor: pointer; color: var(--soft); }
input[type=search] { font: inherit; width: 100%; max-width: 24rem; margin: .5rem 0;
  padding: .3rem .6rem; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; box-sizing: border-box; }
"""

# Shows the rows of the tables in the same fold that hold what is typed.
SEARCH = """
for (const field of document.querySelectorAll("input[type=search]"))
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of field.parentElement.querySelectorAll("tbody tr"))
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
"""
