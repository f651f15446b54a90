"""The report in a real browser, without network: its script runs, nothing of a sample does."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ppo.report.page import build_page
from ppo.report.record import load_records
from tests.ppo.report.made_run import make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
HOVER = """<script>
const c=document.querySelector('svg[data-scale]'),b=c.getBoundingClientRect();
c.dispatchEvent(new PointerEvent('pointermove',{clientX:b.left+b.width/2,clientY:b.top+9}));
document.title=[...c.parentNode.querySelectorAll('figcaption b')].map(b=>b.textContent).join(';');
</script></body>"""


def browse(folder: Path, page: str, *options: str) -> tuple[str, str]:
    """The page's elements once its script has run, and what the browser's console says."""
    assert BROWSER is not None
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"]
    command += [*options, "--dump-dom", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(said)


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_report_and_the_numbers_under_the_pointer(tmp_path) -> None:
    runs = [make_run(tmp_path / f"run{i}", steps=60, seed=i) for i in (0, 1)]
    page = build_page(load_records(runs))
    elements, said = browse(tmp_path, page, "--force-dark-mode", "--window-size=400,3000")
    assert said == "" and 'class="h"' in elements  # the script has run, the policy lets it
    without_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    elements, said = browse(tmp_path, without_policy.replace("</body>", HOVER))
    title = re.search(r"<title>([^<]*)", elements)
    assert said == "" and title and re.fullmatch(r"(-?[\d.e-]+ @\d+;?)+", title[1])
