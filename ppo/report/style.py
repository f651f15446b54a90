"""The page's style and script: dark and light, narrow and wide; no letter of it from elsewhere."""

from ppo.report.samples import STRENGTHS

COLOURS = (
    *("#2563eb", "#dc2626", "#16a34a", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d"),
    *("#475569", "#b45309", "#0d9488", "#9333ea", "#e11d48"),
)
DARK_COLOURS = (
    *("#60a5fa", "#f87171", "#4ade80", "#fbbf24", "#a78bfa", "#22d3ee", "#f472b6", "#a3e635"),
    *("#94a3b8", "#f59e0b", "#2dd4bf", "#c084fc", "#fb7185"),
)

_BASE = """
:root{color-scheme:light dark;--bg:#f8fafc;--card:#fff;--text:#0f172a;--dim:#64748b;--line:#e2e8f0;
--mark:#dc2626;--kl:220,38,38;--kn:37,99,235;--pos:22,163,74;--neg:220,38,38}
@media(prefers-color-scheme:dark){:root{--bg:#0b1120;--card:#131c31;--text:#e2e8f0;--dim:#94a3b8;
--line:#27344d;--mark:#f87171;--kl:248,113,113;--kn:96,165,250;--pos:74,222,128;--neg:248,113,113}}
*{box-sizing:border-box}
body{margin:0;padding:12px;background:var(--bg);color:var(--text);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
main{max-width:1500px;margin:auto}
h1{font-size:1.4rem;margin:.3em 0}h2{font-size:1.15rem;margin:1.6em 0 .5em}
h3{font-size:.95rem;margin:0 0 4px}h3 small{color:var(--dim);font-weight:400}
nav a{margin-right:.6em;display:inline-block}
h4{margin:0 0 6px;font-size:.85rem}
a{color:inherit}
.grid{display:grid;gap:10px;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}
.pair{display:grid;gap:10px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
align-items:start}
.pair>div{display:grid;gap:10px;min-width:0;align-items:start;
grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}
.pair>div>h3,.pair>div>.wide,.pair>div>p,.full{grid-column:1/-1}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px;margin:0;
min-width:0}
svg.chart{width:100%;height:auto;display:block;touch-action:pan-y}
.t line{stroke:var(--line)}.t text{fill:var(--dim);font-size:15px}
path{vector-effect:non-scaling-stroke}
.l{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.b{fill:currentColor;opacity:.16}.a{fill:currentColor;opacity:.8}.g{fill:currentColor;color:var(--c0)}
.e{stroke:var(--mark);stroke-width:1;opacity:.45;fill:none}
.h{stroke:var(--dim);stroke-width:1;fill:none}
.s{stroke:var(--mark);stroke-width:8;fill:none}
.l.d1{stroke-dasharray:7 4}.l.d2{stroke-dasharray:2 4}
figcaption{font-size:.8rem;display:flex;flex-wrap:wrap;gap:2px 12px;color:var(--dim)}
.k::before{content:"";display:inline-block;width:18px;margin-right:5px;vertical-align:middle;
border-top:3px solid var(--k)}
.k.d1::before{border-top-style:dashed}.k.d2::before{border-top-style:dotted}
figcaption b{color:var(--text);font-variant-numeric:tabular-nums}
svg.spark{width:140px;height:26px;display:block}
table{border-collapse:collapse;font-size:.85rem;width:100%}
td,th{text-align:left;padding:3px 8px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n{font-variant-numeric:tabular-nums;white-space:nowrap}
.wide{overflow-x:auto}
pre{white-space:pre-wrap;margin:0 0 6px;font:12.5px/1.5 ui-monospace,monospace;max-height:22em;
overflow:auto}
.w{margin:0;color:var(--dim);font-size:.75rem}
details>summary{cursor:pointer;margin:.4em 0}
i,u{font-style:normal;text-decoration:none}u{color:var(--dim)}
.state{padding:1px 8px;border-radius:9px;border:1px solid currentColor;font-size:.8rem}
#by-kl,#by-a{margin:0 4px 0 10px}
"""

SCRIPT = """
for(const svg of document.querySelectorAll('svg[data-scale]')){
const s=svg.dataset.scale.split(' ').map(Number),g=svg.lastChild,fig=svg.parentNode,
labels=[...fig.querySelectorAll('figcaption b')],old=labels.map(b=>b.textContent),
paths=[...g.querySelectorAll('path.l')];
if(!paths.length)continue;
const pts=paths.map(p=>[...p.getAttribute('d').matchAll(/(\\d+) (\\d+)/g)].map(m=>[+m[1],+m[2]]));
const W=%(W)d,H=%(H)d,line=document.createElementNS('http://www.w3.org/2000/svg','path');
line.setAttribute('class','h');g.append(line);
svg.addEventListener('pointermove',e=>{
const r=g.getScreenCTM(),x=Math.max(0,Math.min(W,(e.clientX-r.e)/r.a));
line.setAttribute('d','M'+x+' 0V'+H);
pts.forEach((p,i)=>{if(!labels[i]||!p.length)return;
let n=p[0];for(const q of p)if(Math.abs(q[0]-x)<Math.abs(n[0]-x))n=q;
labels[i].textContent=(s[3]-(s[3]-s[2])*n[1]/H).toPrecision(4)+' @'+
Math.round(s[0]+(s[1]-s[0])*n[0]/W)})});
svg.addEventListener('pointerleave',()=>{line.setAttribute('d','');
labels.forEach((b,i)=>b.textContent=old[i])})}
"""


def style() -> str:
    """The style sheet."""
    light = "".join(f"--c{i}:{colour};" for i, colour in enumerate(COLOURS))
    dark = "".join(f"--c{i}:{colour};" for i, colour in enumerate(DARK_COLOURS))
    rules = [
        _BASE,
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}",
        *(f".c{i}{{color:var(--c{i});--k:var(--c{i})}}" for i in range(len(COLOURS))),
        "figcaption .k{color:var(--dim)}",
    ]
    for shade in range(1, STRENGTHS + 1):
        opacity = f"{0.75 * shade / STRENGTHS:.2f}"
        for box, letter, colour in (
            *(("kl", "k", "kl"), ("kl", "m", "kn")),
            *(("a", "p", "pos"), ("a", "n", "neg")),
        ):
            # a radio button before the samples says which of both shades them
            rules.append(
                f"#by-{box}:checked~.pair .{letter}{shade}"
                f"{{background:rgba(var(--{colour}),{opacity})}}"
            )
    return "".join(rules)
