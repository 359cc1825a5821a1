"""report.html: one page with the tables and pictures of a performance study, no network and no scripts."""
import base64
import html

from fusion_lab.measuring.gains import Gain
from fusion_lab.measuring.tables import cell
from fusion_lab.study.summary import findings, gain_of
from fusion_lab.training.files import counted

TEXT_COLUMNS = {"shape", "setting", "switch", "not measured"}

STYLE = """
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
       max-width: 100rem; padding: 1rem 2vw 4rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; border-bottom: 1px solid #ccc; }
p, li, figcaption { max-width: 50rem; }
p.meta, figcaption { color: #555; font-size: 0.9rem; }
pre { background: #f4f4f4; padding: 0.6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th { white-space: normal; vertical-align: bottom; }
th.text, td.text { text-align: left; white-space: normal; }
.better { color: #00539c; font-weight: 600; } .worse { color: #a81c00; font-weight: 600; }
@media print { body { font-size: 10pt; padding: 0; } table { font-size: 6pt; } .wide { overflow: visible; }
  th, td { padding: 0.1rem 0.2rem; } tr, figure { break-inside: avoid; } td { white-space: normal; } }
"""


def page(study, summary, how, pictures):
    """The page as text; how: the command and when the study was created; pictures: what draw() returned."""
    machines = summary["machine"]
    where = " and ".join(sorted({m["gpu_name"] or m["host_cpu"] or "" for m in machines})) or "no machine"
    versions = sorted({f"torch {m['torch_version']}, commit {(m['git_commit'] or 'unknown')[:9]}"
                       for m in machines})
    title = f"Performance study on {escape(where)}"
    meta = ", ".join([how["created"][:10], study.amp_dtype or "float32", *versions])
    sections = [
        f'<h1>{title}</h1>\n<p class="meta">{escape(meta)}</p>\n<pre>{escape(how["command"])}</pre>',
        "<ul>", *(f"<li>{escape(sentence)}</li>" for sentence in findings(study, summary)), "</ul>",
        *map(figure, pictures), points_table(study, summary), ablation_table(study, summary),
        method(study)]
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
            f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n"
            + "\n".join(sections) + "\n</body></html>\n")


def escape(text):
    return html.escape(str(text))


def figure(picture):
    title, caption, png = picture
    return (f'<h2>{escape(title)}</h2><figure><img alt="{escape(title)}" src="data:image/png;base64,'
            f'{base64.b64encode(png).decode()}"><figcaption>{escape(caption)}</figcaption></figure>')


def html_table(name, title, head, rows):
    """A section with a table; nothing without rows. A cell is text, or (text, class)."""
    def row(tag, cells):
        parts = []
        for column, content in zip(head, cells, strict=True):
            text, kind = content if isinstance(content, tuple) else (
                content, "text" * (column in TEXT_COLUMNS))
            parts.append(f'<{tag} class="{kind}">{escape(text)}</{tag}>')
        return f"<tr>{''.join(parts)}</tr>\n"

    return (f'<h2>{title}</h2><div class="wide"><table id="{name}"><thead>{row("th", head)}</thead><tbody>'
            f'{"".join(row("td", cells) for cells in rows)}</tbody></table></div>') if rows else ""


def rounded(value, form=".2f", unit=""):
    return cell(value, form, unit=unit) or "n/a"


def gain_cell(gain):
    """Cell for a Gain: coloured only where the interval does not hold 1."""
    return (str(gain), "" if not gain.decided else "better" if gain.factor > 1 else "worse") if gain else ""


def points_table(study, summary):
    head = (*study.axes.values(), "setting", "runs", "step ms", "runs differ by", "samples/s",
            "speed-up (95%)", "peak MB", "saved", "activations MB", "launches", "not measured")
    rows = [[*(p[axis] for axis in study.axes), p["setting"], p["n"], rounded(p["median_ms"]),
             rounded(p["run_spread_percent"], ".1f", "%"), rounded(p["samples_per_second"], ".1f"),
             gain_cell(gain_of(p)),
             rounded(p["peak_memory_mb"], ".1f"), rounded(p["memory_reduction_percent"], ".1f", "%"),
             rounded(p["saved_activation_mb"], ".1f"), rounded(p["launches_per_step"], ".0f"),
             p["reason"] or ""]
            for p in summary["points"]]
    return html_table("points", "All points", head, rows)


def ablation_table(study, summary):
    rows = [[study.label(e), e["switch"],
             *(gain_cell(e[kind] and Gain(**e[kind])) for kind in ("alone", "last"))]
            for e in summary["ablation"]]
    head = "shape", "switch", "alone, over none", "last, over all others"
    return html_table("ablation", "Ablation", head, rows)


def method(study):
    return f"""<h2>How this was measured</h2>
<p>A run of a shape is one process, in which the steps of all settings alternate once they are warm;
settings that compile have a process of their own, beside a baseline. The median of
{counted(study.num_steps, "step")} counts, and of {counted(study.num_runs, "run")} the median. All shapes run
once in random order, then once more, and so on.</p>
<p>Each run gives one speed-up: the median over its rounds of the baseline's step over the setting's. A
point's speed-up is their geometric mean, and its 95% interval Student's t on their logarithms, so a single
run has none. An interval that holds 1 decides nothing. Peak memory is the largest sum of tensors alive within
a step, in MB of 2<sup>20</sup> bytes.</p>"""
