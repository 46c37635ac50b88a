"""A training run as its user sees it: Ctrl-C, a bar, a line for each figure."""

import signal
import sys
import time

import torch

from linattn.programs import files


class CtrlC:
    """In this block the first Ctrl-C is only noted, so that no step is interrupted."""

    def __enter__(self):
        self.came = False
        self.before = signal.signal(signal.SIGINT, self.note)
        return self

    def note(self, *_):
        self.came = True
        signal.signal(signal.SIGINT, self.before)

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)


class Progress:
    """A line for each figure of held-out text, and tqdm's bar on a terminal if there is tqdm."""

    def __init__(self, training):
        self.training, self.bar = training, None
        self.tokens, self.seconds, self.begin = 0, 0.0, time.perf_counter()
        try:
            from tqdm import tqdm

            self.bar = tqdm(
                total=training.options["steps"],
                initial=training.step,
                unit="step",
                leave=False,
                disable=True if training.sharing.rank else None,
            )  # None: it is drawn on a terminal only
        except ImportError:
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.bar.close()

    def rate(self):
        """Bytes trained on per second of training, as text."""
        return f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s"

    def trained(self, steps):
        """Count the steps since the last call, and draw the bar."""
        o, now = self.training.options, time.perf_counter()
        self.tokens += steps * o["batch"] * o["context"]
        self.seconds, self.begin = self.seconds + now - self.begin, now
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"{self.training.recent():.3f} bits/byte, {self.rate()}", refresh=False
            )
            self.bar.update(steps)

    def evaluated(self, bits):
        """Print the figure of held-out text."""
        steps = self.training.options["steps"]
        line = (
            f"step {self.training.step:{len(str(steps))}}/{steps}   training "
            f"{self.training.recent():.3f}   held out {bits:.3f} bits/byte   {self.rate()}"
        )
        (print if self.bar is None else self.bar.write)(line)
        sys.stdout.flush()
        self.begin = time.perf_counter()  # the time of the evaluation is not part of the rate


def draw(path, training, bits, baselines):
    """Draw the loss along the run, in bits per byte, beside the compressors' figures."""
    from matplotlib.figure import Figure

    axes = (figure := Figure((8, 5), layout="constrained")).add_subplot()
    losses = torch.tensor(training.losses)
    width = max(1, len(losses) // 50)
    means = losses[: len(losses) // width * width].view(-1, width).mean(1).tolist()
    axes.plot(range(1, len(losses) + 1), losses, lw=0.5, alpha=0.4, color="C0")
    axes.plot([width * (i + 0.5) for i in range(len(means))], means, color="C0", label="training")
    axes.plot(
        *zip(*training.held_out, strict=True),
        "o-",
        ms=4,
        color="C1",
        label="held out, a part of it",
    )
    axes.plot(training.step, bits, "*", ms=12, color="C3", label=f"held out, all of it  {bits:.3f}")
    for (name, value), style in zip(baselines.items(), ("--", ":"), strict=True):
        axes.axhline(value, color="0.4", lw=1, ls=style, label=f"{name}  {value:.3f}")
    top = max([bits, *baselines.values(), *means])
    axes.set(
        xlabel="step",
        ylabel="bits per byte",
        xlim=(0, 1.03 * training.step),
        ylim=(0, 1.05 * top),
        title=f"A byte-level language model, {training.options['layer']}",
    )
    axes.legend(fontsize=9)
    axes.grid(alpha=0.25)
    files.save_figure(figure, path)
