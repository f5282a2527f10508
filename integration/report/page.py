"""One HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from html import escape

_CSS = """
:root { color-scheme: light; --ink: #1e293b; --soft: #64748b; --line: #e2e8f0; --accent: #d9480f; }
* { box-sizing: border-box; }
body { margin: 0; background: #f8fafc; color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 40px 0 12px; }
p { margin: 0 0 12px; max-width: 76ch; }
.lead { font-size: 19px; color: var(--ink); max-width: 70ch; }
.subtitle { color: var(--soft); margin-bottom: 20px; }
.note { background: #fff7ed; border-left: 4px solid var(--accent); padding: 10px 16px; margin: 16px 0; border-radius: 4px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 22px 0 8px; }
.tile { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; }
.tile b { display: block; font-size: 30px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 14px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 18px; }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
figure h3 { margin: 0 0 8px; font-size: 16px; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 14px; margin-top: 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: #fff; border: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th, td { padding: 7px 16px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
thead th { background: #f1f5f9; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0 0 12px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; overflow-x: auto; font-size: 13px; line-height: 1.45; }
code { font-size: 0.92em; }
details summary { cursor: pointer; margin: 8px 0; }
@media print { body { background: #fff; } figure, .tile { break-inside: avoid; } }
"""


def paragraph(text, kind=None):
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text):
    return f"<h2>{escape(text)}</h2>"


def note(text):
    return f'<div class="note">{escape(text)}</div>'


def tiles(items):
    """items: (value, what it is)."""
    inner = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in items)
    return f'<div class="tiles">{inner}</div>'


def figure(title, svg, caption):
    return f"<figure><h3>{escape(title)}</h3>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def figures(items):
    """items: (title, svg, caption)."""
    return f'<div class="figures">{"".join(figure(*item) for item in items)}</div>'


def table(header, rows):
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def pairs(items):
    """items: (label, value)."""
    return "<dl>" + "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in items) + "</dl>"


def bullets(items):
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def folded(title, text):
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def document(title, parts):
    return ("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
            f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body><main>\n" + "\n".join(parts) +
            "\n</main></body></html>\n")
