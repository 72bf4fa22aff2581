"""Row kernels: programs take whole rows, reductions join columns."""

from __future__ import annotations

from math import prod

from ..ops import ITEMSIZE
from .base import Knob, Knobs, Source, Space, Task
from .choices import (
    default_math,
    default_overlap,
    early_choices,
    has_moments,
    held_tiles,
    hinted,
    hints,
    near,
    next_power,
    other_math,
    overlap,
    streamed,
    strided,
    widest,
)
from .expr import walk
from .joint import JointRows
from .mathmode import MODES
from .split import SplitRows
from .tile import MAX_TILE, MAX_UNROLLED, Tiles

WHOLE_MAX = 2**16  # columns of a whole row in registers
REGISTER_BYTES = 2**17  # of a row that is kept: half of what a processor's registers hold
MANY_STEPS = 60  # expressions of a row's elements that want more registers than the row
SPLIT_MIN = 2**13  # columns of a row that several programs share


def padded(task: Task) -> int:
    """Columns of the widest space, each axis filled up to a power of two."""
    return max((prod(next_power(int(task.low.extents[a])) for a in s) for s in task.low.spaces), default=1)


def _side_by_side(task: Task) -> int:
    """The width of blocks that lie side by side in place of a row filled up to a power of two; 0 where that gains little."""
    real, cols = widest(task), padded(task)
    if len(task.low.spaces) != 1 or real * 5 > cols * 4 or not 256 < real <= WHOLE_MAX:
        return 0
    # as few blocks as leave little of the last one empty
    sizes = [b for b in (8192, 4096, 2048, 1024, 512, 256) if 2 * b <= real and -(-real // b) <= 8]
    return next((b for b in sizes if -(-real // b) * b * 10 <= real * 11), sizes[-1] if sizes else 0)


def _row_bytes(task: Task) -> int:
    """Bytes of a row of all inputs that vary with rows and columns alike."""
    low, chain, total = task.low, task.chain, 0
    for k, v in enumerate(chain.inputs):
        if chain.users[k] and any(not isinstance(d, int) for d in v.shape):
            total += prod(d for d in v.shape if isinstance(d, int)) * ITEMSIZE[v.dtype]
    kept = prod(int(low.extents[a]) for a in low.rows if isinstance(low.extents[a], int))
    return total // max(1, kept)


class RowReduce:
    """Whole rows in registers, columns in blocks with accumulators, or rows split among programs."""

    name = "rowreduce"
    version = 5

    def match(self, task: Task) -> bool:
        """Any segment with a reduction over columns alone, or with outputs of several widths."""
        return not task.low.reduced and (bool(task.low.reduces) or len(task.low.spaces) > 1)

    def space(self, task: Task) -> Space:
        if task.limits.target == "cpu":
            from .nest import cpu_space

            return cpu_space(self.name, self.version, task)
        cols = padded(task)
        few = task.rows < 4 * task.limits.sm_count  # then some processors would have nothing to do
        can_split = cols >= SPLIT_MIN and bool(task.low.reduces) and (few or cols > 2**15)
        real, apart = widest(task), strided(task)
        joint = real > SPLIT_MIN and bool(task.low.reduces) and len(task.low.spaces) == 1 and task.limits.sm_count >= 16
        kinds = (
            ("whole", cols <= WHOLE_MAX),
            ("unrolled", 256 < cols <= WHOLE_MAX and (real * 9 <= cols * 8 or cols >= 2**12)),
            ("looped", cols > 1024 or (apart and cols > 128)),
            ("split", can_split),
            ("joint", joint),
        )
        several = {r for r in (2, 4, 8, 16, 32, 64) if apart or (r < 64 and r * cols <= 2**15) or (joint and r <= 4)}
        rows = (1, *sorted(several if task.low.rows else ()))
        blocks = ("unrolled", "looped", "split", "joint")
        held = ("whole", "unrolled", "joint")  # rows in registers
        knobs = (
            Knob("form", tuple(f for f, ok in kinds if ok)),
            Knob("rows_per_program", rows, (("form", ("whole", "unrolled", "looped", "joint")),)),
            Knob("num_warps", (1, 2, 4, 8, 16, 32)),
            Knob("keep", ("wide", "storage", *(("rounded",) if task.low.halves else ())), (("form", held),)),
            Knob("early", early_choices(task), (("form", held),)),
            Knob("registers", (0, 32, 40, 48, 56, 64, 72, 80, 96, 128), (("form", held),)),
            Knob("persistent", (0, 1, 2, 4) if task.low.rows else (0,), (("form", ("whole", "unrolled")),)),
            Knob("block_cols", (128, 256, 512, 1024, 2048, 4096, 8192, 16384), (("form", blocks),)),
            Knob("pieces", (2, 4, 8, 16, 32, 64, 128), (("form", ("split",)),)),
            Knob("pieces", (2, 4, 8, 16, 32), (("form", ("joint",)),)),
            Knob("num_stages", (1, 2, 3, 4), (("form", ("looped", "split")),)),
            Knob("num_stages", (1, 2, 3, 4), (("form", ("whole", "unrolled")), ("persistent", (1, 2, 4)))),
            Knob("online", (0, 1), (("form", ("looped", "split")),)),
            Knob("turn", (0, 1), (("form", ("looped", "split")),)),
            Knob("math", MODES),
            *hints(task, True),
            near(task),
            overlap(task),
        )

        def check(k: Knobs) -> str | None:
            block = cols if k["form"] == "whole" else min(cols, int(k["block_cols"]))
            tile = int(k.get("rows_per_program", 1)) * block
            threads = 32 * int(k["num_warps"])
            if k["form"] == "unrolled":
                if not 2 * block <= real <= MAX_UNROLLED * block:
                    return "too few or too many blocks side by side"
                if int(k["rows_per_program"]) * real > threads * 128:
                    return "over 128 elements a thread"
            if k["form"] == "joint":
                if int(k["pieces"]) > task.limits.sm_count:  # of which each runs one program at least
                    return "more programs wait for each other than surely run at once"
                share = -(-real // int(k["pieces"]))
                if not block <= share <= MAX_UNROLLED * block or share * int(k["rows_per_program"]) > threads * 128:
                    return "too few or too many blocks side by side"
            if k["form"] == "looped" and block < cols // 64:
                return "over 64 passes"
            if threads * int(k.get("registers", 0)) > 65536:
                return "more registers than a processor has"
            if k.get("persistent") and (int(k["num_stages"]) - 1) * streamed(task) * tile > task.limits.shared_bytes:
                return "more stages than shared memory holds"
            if tile > MAX_TILE:
                return "the tile has too many elements"
            if tile < threads // 2 and threads > 32:
                return "more threads than elements"
            if tile > threads * 128:
                return "over 128 elements a thread"
            if k["form"] == "split" and int(k["pieces"]) * int(k["block_cols"]) > 2 * cols:
                return "more pieces than blocks of columns"
            return None

        return Space(self.name, self.version, knobs, check)

    def seed(self, task: Task) -> dict[str, int | str]:
        if task.limits.target == "cpu":
            from .nest import cpu_seed

            return cpu_seed(task)
        cols, real = padded(task), widest(task)
        common: dict[str, int | str] = {
            "math": default_math(task), **hinted(task, ""), "near": "", "overlap": default_overlap(task),
        }  # fmt: skip
        early = 1 if 1 in early_choices(task) else 0
        registers = self._registers(task, early)
        keep = "storage" if registers and held_tiles(task) > 1 else "wide"
        held = {"early": early, "persistent": 0, "registers": registers, **common}
        if strided(task) and task.low.rows and cols > 128:
            return {
                "form": "looped", "rows_per_program": 32, "num_warps": 8, "block_cols": 128, "num_stages": 1, "online": 1,
                "turn": 0, **common,
            }  # fmt: skip
        block = _side_by_side(task)
        kept = _row_bytes(task)
        if real > 2**14 and kept <= REGISTER_BYTES and len(task.low.spaces) == 1 and real <= WHOLE_MAX:
            # as it came, a row takes up to half of a processor's registers, and little beside it where few are widened at once
            warps = 16 if kept <= REGISTER_BYTES // 2 else 32
            return {
                "form": "unrolled", "rows_per_program": 1, "num_warps": warps, "keep": "storage",
                "block_cols": 4096 if real <= 2**15 else 8192, **held,
            }  # fmt: skip
        if block and real <= 2**14:
            warps = max(1, min(16, block // 256, next_power(real) // 1024))
            return {"form": "unrolled", "rows_per_program": 1, "num_warps": warps, "keep": keep, "block_cols": block, **held}
        if cols <= 2**14:
            rows = 1
            while task.low.rows and rows < 8 and cols * rows * 2 <= 2048 and task.rows >= 4 * rows * task.limits.sm_count:
                rows *= 2
            # many programs on a processor overlap; one alone there is all the faster with more threads
            few = task.rows <= 2 * task.limits.sm_count
            warps = min(16, max(1, next_power(cols * rows // (256 if few else 1024))))
            least = 4 if cols * rows >= 1024 else 1
            return {"form": "whole", "rows_per_program": rows, "num_warps": max(warps, least), "keep": keep, **held}
        # each reduction keeps a block of registers, a variance in one pass four
        many = len(task.low.reduces) >= 4
        block = 4096 if many else 8192 if has_moments(task.low) else 2**14
        return {
            "form": "looped", "rows_per_program": 1, "num_warps": 16 if many else 32, "num_stages": 1, "online": 1, "turn": 1,
            "block_cols": block,
            **common,
        }  # fmt: skip

    def _registers(self, task: Task, early: int) -> int:
        """With half of what it might take a program leaves room for a second one, which loads while it reduces."""
        cols, steps = padded(task), sum(1 for _ in walk([s.value for s in task.low.stores]))
        if task.rows <= 2 * task.limits.sm_count:
            return 0
        if early or steps > MANY_STEPS:
            return 80 if cols <= 2**13 else 0 if steps > MANY_STEPS else 64
        return 64

    def variants(self, task: Task) -> list[dict[str, int | str]]:
        if task.limits.target == "cpu":
            return []
        seed = self.seed(task)
        cols, rows, warps = padded(task), int(seed.get("rows_per_program", 1)), int(seed["num_warps"])
        more_rows = 2 * rows if task.low.rows and 2 * rows * cols <= 2**15 else rows
        made = other_math(task)[:1]
        if cols >= SPLIT_MIN and task.rows <= 4 * task.limits.sm_count:
            pieces = max(2, min(128, next_power(2 * task.limits.sm_count // max(1, task.rows)), cols // 2048))
            made.append(
                {"form": "split", "pieces": pieces, "block_cols": 1024, "num_warps": 4, "num_stages": 2, "online": 1, "turn": 1}
            )
        if widest(task) > 2**14:
            # a piece takes an eighth of a processor's registers, so that four programs are there at once: some wait, some load
            pieces = next_power(_row_bytes(task) // (REGISTER_BYTES // 4))
            held: dict[str, int | str] = {"form": "joint", "block_cols": 2048, "num_warps": 8, "keep": "storage", "early": 0}
            made += [
                {**held, "pieces": pieces, "registers": 64},
                {**held, "pieces": pieces, "registers": 80, "keep": "wide"},
                {**held, "pieces": pieces // 2, "registers": 64, "block_cols": 8192, "num_warps": 16},
                {**held, "pieces": 2 * pieces, "registers": 40},
                {**held, "pieces": 2 * pieces, "registers": 64},
            ]
            if len(near(task).values) > 1:
                made.append({**held, "rows_per_program": 2, "pieces": 2 * pieces, "registers": 64})
            if task.low.halves:
                few = next_power(2 * widest(task) // (REGISTER_BYTES // 4))
                made += [
                    {**held, "keep": "rounded", "pieces": 2 * few, "registers": 64},
                    {**held, "keep": "rounded", "pieces": few, "registers": 64, "block_cols": 8192, "num_warps": 16},
                    {**held, "keep": "rounded", "pieces": few, "registers": 80},
                ]
            made = [m for m in made if m.get("form") != "joint" or 2 <= int(m["pieces"]) <= 32]
        if seed["form"] == "looped":
            made += [{"num_warps": 16, "block_cols": 8192}, {"online": 0}, {"num_stages": 3}]
            made.append(hinted(task, "reuse"))
        if seed["form"] in ("whole", "unrolled"):
            # inputs that stay in the cache make way for no output
            made.append(hinted(task, "evict_last"))
            others: list[dict[str, int | str]] = [
                {"num_warps": 2 * warps},
                {"num_warps": max(1, warps // 2)},
                {"rows_per_program": more_rows},
            ]
            if widest(task) > 2**12:
                # 64 elements a thread as they came, and several programs on a processor
                kept = next_power(widest(task)) // 2048
                held = {"form": "unrolled", "rows_per_program": 1, "keep": "storage", "persistent": 0, "early": 0}
                light = {**held, "num_warps": kept, "block_cols": 256 * kept, "registers": 80}
                full = {**held, "num_warps": 2 * kept, "block_cols": 512 * kept, "registers": 64}
                apart = {**hinted(task, "past"), "near": "evict_last"} if len(near(task).values) > 1 else {}
                rounded = [{**light, "keep": "rounded"}, {**full, "keep": "rounded"}] if task.low.halves else []
                made += [light, full, *rounded, *([{**light, **apart}, apart] if apart else []), {**light, "registers": 64}]
            else:
                made += others
                others = []
            made += [{"early": e} for e in early_choices(task) if e != seed["early"]]
            # fewer registers, more programs on a processor: one loads while another reduces
            made += [{"num_warps": 2 * warps, "registers": 40}, {"registers": 0}, *others]
            made.append({"keep": "storage" if seed["keep"] == "wide" else "wide", "registers": 48})
            made.append(hinted(task, "evict_first"))
            made.append({"rows_per_program": more_rows, "num_warps": 2 * warps})
            made += [{"persistent": 2, "num_stages": 3, "registers": 0}, {"persistent": 4, "num_stages": 2, "registers": 0}]
            # a row that is read again in each pass is in the cache, and leaves the registers free
            again: dict[str, int | str] = {"form": "looped", "block_cols": min(2**14, next_power(cols)), "online": 0, "turn": 0}
            made.append({**again, "rows_per_program": more_rows})
            if cols > 2**14:
                made.insert(1, {"form": "looped", "block_cols": 2**14, "num_warps": 32, "num_stages": 1, "online": 1, "turn": 1})
        made += [*other_math(task)[1:], {"overlap": 1 - int(seed["overlap"])}]
        return made

    def emit(self, task: Task, knobs: Knobs) -> Source:
        knobs = self.space(task).validate(knobs)
        if task.limits.target == "cpu":
            from .nest import Nest

            return Nest(task, knobs).source()
        form = str(knobs["form"])
        if form == "split":
            return SplitRows(task, knobs).source()
        if form == "joint":
            return JointRows(task, knobs).source()
        return Tiles(task, knobs, int(knobs["rows_per_program"]), form, int(knobs.get("block_cols", 0))).source()
