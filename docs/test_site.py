"""The built site in a browser: `make docs`, then pytest docs/test_site.py (chromium, its driver).

LINATTN_SITE is the folder of the site, build/docs by default.
"""

import ast
import os
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import linattn

HERE = Path(__file__).resolve().parent
SITE = Path(os.environ.get("LINATTN_SITE", HERE.parent / "build" / "docs")).resolve()
WIDTHS = {"desktop": 1280, "narrow": 360}


# ---- the pages ----


def entries():
    """The names of Python's domain in objects.inv, the list of what the site describes."""
    _, _, _, _, packed = (SITE / "objects.inv").read_bytes().split(b"\n", 4)
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split()[0] for line in lines if line.split()[1].startswith("py:")}


@pytest.mark.parametrize(
    "module",
    ["linattn", "linattn.plot", "linattn.reference", "linattn.testing", "linattn.cuda"],
)
def test_every_public_name_has_an_entry(module):
    names = __import__(module, fromlist=["__all__"]).__all__
    assert names
    missing = {f"{module}.{name}" for name in names} - entries()
    assert not missing


@pytest.mark.parametrize(
    "file", ["nn/__init__.py", "compat/fla.py", "compat/transformers/__init__.py"]
)
def test_every_public_name_has_an_entry_without_pytorch(file):
    """These modules import PyTorch, which may not be here: their lists are read from the text."""
    path = Path(linattn.__file__).parent / file
    module = "linattn." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lists = [
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    assert len(lists) == 1 and lists[0]
    assert not {f"{module}.{name}" for name in lists[0]} - entries()


def test_a_missing_name_would_be_noticed():
    assert "linattn.no_such_op" not in entries()
    assert "linattn.gla_step" in entries()


def test_every_notebook_has_a_page_and_a_card():
    gallery = (SITE / "notebooks" / "index.html").read_text()
    notebooks = sorted((HERE / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        assert (SITE / "notebooks" / f"{path.stem}.html").exists()
        assert f'href="{path.stem}.html"' in gallery
    assert gallery.count('class="card-picture"') == len(notebooks)


def test_links_lead_somewhere_and_a_broken_one_is_found(tmp_path):
    sys.path.insert(0, str(HERE))
    import check_links

    assert check_links.broken(SITE) == []
    (tmp_path / "a.html").write_text('<p id="x"></p><a href="#x"><a href="#y"><a href="b.html">')
    assert len(check_links.broken(tmp_path)) == 2


# ---- in the browser ----


@pytest.fixture(scope="module")
def driver():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(params=WIDTHS)
def browser(driver, request):
    make_wide(driver, WIDTHS[request.param])
    return driver


def make_wide(driver, width):
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )


def opened(browser, page):
    browser.get((SITE / page).as_uri())
    return browser


def says(browser, name):
    return browser.find_element(By.CSS_SELECTOR, f"#{name} output").text


def shown(browser, name):
    """The one frame of a picture that is displayed, of all that the page has."""
    frames = browser.find_elements(By.CSS_SELECTOR, f"#{name} .frames-frame")
    displayed = [frame for frame in frames if frame.is_displayed()]
    assert len(displayed) == 1 < len(frames)
    return displayed[0].text


def press(browser, control, key, times=1):
    element = browser.find_element(By.ID, control)
    for _ in range(times):
        element.send_keys(key)


def choose(browser, control, text):
    """An entry of a list, by the arrow keys."""
    element = browser.find_element(By.ID, control)
    for _ in element.find_elements(By.TAG_NAME, "option"):
        if element.get_property("selectedOptions")[0].text == text:
            return
        element.send_keys(Keys.ARROW_DOWN)
    raise AssertionError(f"{control}: no entry {text}")


TOKENS = ["The", "cat", "sat", "on", "mat"]
Q = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
K = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]
V = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]]


def test_the_kernel_trick(browser):
    opened(browser, "widgets.html")
    why = linattn.explain(Q, K, V, exact=True)
    for i, token in enumerate(TOKENS):
        output = ", ".join(map(str, why.output[i]))
        assert says(browser, "kernel-trick") == (
            f"{token}: denominator {why.denominators[i]}, output ({output})"
        )
        assert f"{token} reads: phi(q)' S, phi(q)' z" in shown(browser, "kernel-trick")
        press(browser, "kernel-trick-0", Keys.ARROW_RIGHT)
    slider = browser.find_element(By.ID, "kernel-trick-0")
    assert slider.get_attribute("aria-valuetext") == "mat"
    press(browser, "kernel-trick-0", Keys.HOME)
    assert says(browser, "kernel-trick").startswith("The:")


def test_weights_beside_softmax(browser):
    opened(browser, "widgets.html")
    q, k = np.random.default_rng(0).standard_normal((2, 16, 8))
    for phi, entry in (("exp", "exp"), ("identity", "identity, not normalised")):
        choose(browser, "beside-softmax-0", entry)
        press(browser, "beside-softmax-1", Keys.HOME)
        for size in (0.5, 1, 1.5):
            A = linattn.implicit_weights(
                size * q, size * k, feature_map=phi, normalize=phi != "identity"
            )
            softmax = linattn.reference.softmax_weights(size * q, size * k)
            difference = np.abs(A - softmax).sum(1).mean() / 2
            assert f"row from softmax: {difference:.3f}." in says(browser, "beside-softmax")
            press(browser, "beside-softmax-1", Keys.ARROW_RIGHT)


@pytest.mark.parametrize("op", linattn.OPS)
def test_the_state(browser, op):
    opened(browser, "widgets.html")
    T, variant = len(TOKENS), linattn.VARIANTS[op]
    decay = np.full((T, 4) if variant.decay == "key" else T, 0.9)
    gates = {"beta": np.full(T, 0.5)} if variant.rule == "delta" else {}
    gates |= {"x": np.array(K, float), "y": 0.5 * np.array(K)} if variant.rule == "dplr" else {}
    gates |= {"eta": np.full(T, 0.5)} if variant.decay == "pair" else {}
    always = {"bonus": np.ones(4)} if variant.rule == "bonus" else {}
    if variant.decay in ("token", "key", "pair"):
        gates["alpha"] = decay
    elif op == "retention":
        gates["gamma"] = decay[:1]
    elif variant.decay == "head":
        gates["slopes"] = -np.log(decay[:1])
    choose(browser, "the-state-0", op)
    for t in range(T):
        q, k, v = (np.array(x, float)[: t + 1] for x in (Q, K, V))
        cut = {name: x if len(x) == 1 else x[: t + 1] for name, x in gates.items()}
        _, S = getattr(linattn, op)(q, k, v, **cut, **always, output_final_state=True)
        S = S[0] if isinstance(S, tuple) else S
        assert says(browser, "the-state") == (
            f"{op}, after {TOKENS[t]}: |S| = {np.linalg.norm(S):.4f}"
        )
        assert f"{S[3, 2]:.3f}" in shown(browser, "the-state")
        press(browser, "the-state-1", Keys.ARROW_RIGHT)


def test_cost(browser):
    opened(browser, "widgets.html")
    for d in (16, 32, 64, 128, 256):
        press(browser, "cost-0", Keys.HOME)
        for T in (2**n for n in range(4, 21)):
            linear, softmax = (linattn.flops(op, T, d, d) for op in ("linear_attention", "softmax"))
            cheaper = "linear attention" if linear < softmax else "softmax"
            factor = max(linear, softmax) / min(linear, softmax)
            text = says(browser, "cost")
            assert f"Fewer operations: {cheaper}, by a factor of {factor:.3g}." in text
            kept = [linattn.memory(op, T, d, d).kept for op in ("linear_attention", "softmax")]
            lighter = "linear attention" if kept[0] < kept[1] else "softmax"
            assert f"Less memory: {lighter}, by a factor of {max(kept) / min(kept):.3g}." in text
            press(browser, "cost-0", Keys.ARROW_RIGHT)
        press(browser, "cost-1", Keys.ARROW_RIGHT)


# The theme cuts elements that are too wide. These are the ones that it cuts outside of a box that
# scrolls. There should be none.
HIDDEN = """
const scrolls = (element) => {
  for (let e = element; e.tagName !== "ARTICLE"; e = e.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
  return false;
};
return [...document.querySelectorAll("article *")]
  .filter((e) => e.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(e))
  .map((e) => e.outerHTML.slice(0, 80));
"""


@pytest.mark.timeout(900)  # beside other work a page takes a second, and there are hundreds
@pytest.mark.parametrize("part", range(4))
def test_no_page_scrolls_sideways_or_is_cut(driver, part):
    """A page is loaded once, and then made as wide as each kind of window. The pages of single
    functions are alike, and fit into a wide window if they fit into a narrow one."""
    pages = [path for path in sorted(SITE.rglob("*.html")) if "_static" not in path.parts]
    assert len(pages) > len(linattn.__all__)
    for path in pages[part::4]:
        driver.get(path.as_uri())
        for name, width in WIDTHS.items():
            if path.parent.name == "generated" and name != "narrow":
                continue
            make_wide(driver, width)
            wide, window = driver.execute_script(
                "return [document.documentElement.scrollWidth, window.innerWidth]"
            )
            assert wide <= window == width, f"{path.name}, {name}"
            assert not driver.execute_script(HIDDEN), f"{path.name}, {name}"


def test_controls_have_labels(browser):
    opened(browser, "widgets.html")
    controls = browser.find_elements(By.CSS_SELECTOR, ".frames input, .frames select")
    assert len(controls) == 7
    for control in controls:
        at = control.get_attribute("id")
        assert browser.find_element(By.CSS_SELECTOR, f'label[for="{at}"]').text
        assert control.is_displayed()


def test_without_javascript_the_first_frame_is_there(driver):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened(driver, "widgets.html")
        for name in ("kernel-trick", "beside-softmax", "the-state", "cost"):
            assert says(driver, name)
            shown(driver, name)
            assert not driver.find_element(By.ID, f"{name}-0").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_search_finds_an_op(browser):
    browser.get((SITE / "search.html").as_uri() + "?q=gated_delta_rule")
    links = WebDriverWait(browser, 20).until(
        lambda browser: browser.find_elements(By.CSS_SELECTOR, "#search-results li a")
    )
    assert any("linattn.gated_delta_rule.html" in link.get_attribute("href") for link in links)
