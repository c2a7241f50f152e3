"""`longpack bench`: one command a measurement."""

from cyclopts import App

from longpack.cli.bench_attention import attention, documents, overhead, precision
from longpack.cli.bench_layouts import calibrate, layouts, straggler
from longpack.cli.bench_ranks import ranks
from longpack.cli.bench_replay import replay
from longpack.cli.bench_scaling import scaling
from longpack.cli.bench_watch import watch

bench = App(name="bench", help="Measure on this machine, against what people do today.")
for command in (
    attention,
    documents,
    overhead,
    precision,
    scaling,
    ranks,
    layouts,
    straggler,
    calibrate,
    replay,
    watch,
):
    bench.command(command)
