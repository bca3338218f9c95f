"""The suite that every implementation of `attention` passes: against float64, at odd sizes, packed, and transformed."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

import dormouse_jax
from dormouse_jax import attention, dispatch
from pallas_kernels import attention as kernels
from pallas_kernels.attention import config, mosaic
from pallas_kernels.attention.sizes import Sizes
from tests import helpers
from torch_ref.attention import attention as torch_attention
from torch_ref.attention import attention_composite, attention_oracle

IMPLEMENTATIONS = ("xla", "pallas_triton")

# Where kernels are interpreted, tiles are small: several are walked through at small sizes.
SMALL_HOPPER_TILES = kernels.AttentionConfig(*(kernels.HopperTiles(64, 2) for _ in range(3)))
SMALL_TILES = kernels.AttentionConfig(kernels.Tiles(16, 32), kernels.Tiles(32, 16), kernels.Tiles(16, 16))


def setUpModule():
    if not helpers.on_gpu():
        hopper = dict.fromkeys(config._HOPPER, SMALL_HOPPER_TILES)
        for patch in (
            mock.patch.object(kernels, "choose_config", lambda *args, **kwargs: SMALL_TILES),
            mock.patch.object(config, "_HOPPER", hopper),
        ):
            patch.start()
            absltest.unittest.addModuleCleanup(patch.stop)


def each(*, few=lambda *case: True, **axes):
    """Named parameters for the product of `axes` and the implementations; interpreted kernels, which compile slowly,
    take the cases that `few` says, by the axes' values."""
    names = ("implementation", *axes)
    return parameterized.named_parameters(
        {"testcase_name": "_".join(str(value) for value in case).replace(" ", "")} | dict(zip(names, case, strict=True))
        for case in itertools.product(IMPLEMENTATIONS, *axes.values())
        if case[0] == "xla" or helpers.on_gpu() or few(*case[1:])
    )


def problem(Tq, Tk=None, *, B=2, H=4, HK=2, D=20, dtype="float32", seed=0):
    """(arrays by name, do) of a random problem."""
    rng, Tk = np.random.default_rng(seed), Tq if Tk is None else Tk
    shapes = {"q": (B, Tq, H, D), "k": (B, Tk, HK, D), "v": (B, Tk, HK, D), "do": (B, Tq, H, D)}
    arrays = {name: rng.normal(size=shape).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}
    return arrays, arrays.pop("do")


def value_and_grads(arrays, do, implementation, **options):
    def fn(arrays):
        return attention(**arrays, implementation=implementation, **options)

    with helpers.kernels_run(implementation):
        o, vjp = jax.vjp(fn, jax.tree.map(jnp.asarray, arrays))
        (grads,) = vjp(jnp.asarray(do))
    return {"o": o} | {f"d{name}": x for name, x in grads.items()}


def assert_accurate(arrays, do, implementation, *, precision="fp32", **options):
    got = value_and_grads(arrays, do, implementation, precision=precision, **options)
    want = attention_oracle(**arrays, do=do, **options)
    for name, x in got.items():
        assert x.dtype == do.dtype, f"{name}: {x.dtype}, expected {do.dtype}"
    # With one key there is nothing to choose between: gradients of queries and keys are 0, but for rounding.
    floor = 1.0 if np.sqrt(np.mean(want["dk"] ** 2)) < 1e-12 else 0.0
    helpers.assert_all_close(got, want, precision=precision, floor=floor)


SIZES = {
    "one_token": (1, 1),
    "odd": (75, 75),
    "few_queries": (20, 81),
    "more_queries_than_keys": (81, 20),
    "one_key": (40, 1),
}
GPU_SIZES = {
    "less_than_a_tile": (7, 7),
    "whole_tiles": (256, 256),
    "one_query": (1, 70),
    "a_thousand": (1003, 1003),
    "two_thousand": (2048, 2048),
    "decoding": (3, 4096),
    "queries_that_see_nothing": (3000, 517),
}
if helpers.on_gpu():
    SIZES |= GPU_SIZES


class AccuracyTest(parameterized.TestCase):
    """Against float64: the output and the gradients of q, k and v."""

    @each(
        size=tuple(SIZES),
        causal=(True, False),
        few=lambda size, causal: f"{size} {causal}" in ("odd True", "few_queries False", "more_queries_than_keys True"),
    )
    def test_sizes(self, implementation, size, causal):
        arrays, do = problem(*SIZES[size])
        assert_accurate(arrays, do, implementation, causal=causal)

    @each(heads=((1, 1), (3, 3), (6, 2), (4, 1)), few=lambda heads: heads == (6, 2))
    def test_heads(self, implementation, heads):
        arrays, do = problem(600 if helpers.on_gpu() else 33, H=heads[0], HK=heads[1], seed=heads[0])
        assert_accurate(arrays, do, implementation)

    @each(
        D=(1, 3, 16, 32, 60, 64, 100, 128, 192, 200, 256) if helpers.on_gpu() else (3, 256),
        dtype=("float32", "bfloat16"),
        few=lambda D, dtype: D == 3 and dtype == "float32",
    )
    def test_dims(self, implementation, D, dtype):
        arrays, do = problem(517 if helpers.on_gpu() else 24, B=1, D=D, dtype=dtype)
        assert_accurate(arrays, do, implementation, precision="fp32" if dtype == "float32" else "16bit")

    @each(
        dtype=(("bfloat16", "16bit"), ("float16", "16bit"), ("float32", "tf32")),
        D=(64, 128, 256) if helpers.on_gpu() else (32,),
        few=lambda dtype, D: dtype[1] == "16bit",
    )
    def test_precisions(self, implementation, dtype, D):
        dtype, precision = dtype
        arrays, do = problem(1003 if helpers.on_gpu() else 40, D=D, dtype=dtype)
        assert_accurate(arrays, do, implementation, precision=precision)

    @each(few=lambda: False)
    def test_scale(self, implementation):
        arrays, do = problem(40)
        assert_accurate(arrays, do, implementation, scale=0.7)
        assert_accurate(arrays, do, implementation, scale=1)

    @each()
    def test_large_scores(self, implementation):
        # Scores of some hundreds: their exponentials overflow unless the largest is taken off.
        arrays, do = problem(40, H=1, HK=1)
        arrays["q"] *= 60
        got = value_and_grads(arrays, do, implementation)
        want = attention_oracle(**arrays, do=do)
        for name, x in got.items():  # a score of 500 has an error of 500 eps, and its exponential that relative one
            helpers.assert_close(x, want[name], rms=1e-4, name=name)

    @each(few=lambda: False)
    def test_the_same_bits_again(self, implementation):
        arrays, do = problem(1003 if helpers.on_gpu() else 40)
        first = value_and_grads(arrays, do, implementation)
        for _ in range(20 if helpers.on_gpu() else 1):
            helpers.assert_same_bits(value_and_grads(arrays, do, implementation), first)

    def test_of_another_head_dim_gets_its_configuration(self):
        if not helpers.on_gpu():
            self.skipTest("tiles are fixed here")
        configs = {kernels.choose_config("", D=D, precision="fp32") for D in (64, 128, 256)}
        self.assertLen(configs, 3)


HOPPER_SIZES = {"queries_and_keys": (200, 200), "few_queries": (72, 200), "more_queries_than_keys": (200, 72)}
if helpers.on_gpu():
    HOPPER_SIZES |= {"eight": (8, 8), "whole_tiles": (1024, 1024), "odd": (2056, 2056), "decoding": (8, 4104)}


class HopperTest(parameterized.TestCase):
    """The kernels on Mosaic GPU."""

    def setUp(self):
        super().setUp()
        if helpers.on_gpu() and jax.devices()[0].compute_capability != "9.0":
            self.skipTest("it is for Hopper")

    @parameterized.named_parameters(
        {"testcase_name": f"{size}_{dtype}_{D}_{'causal' if causal else 'full'}"}
        | {"size": size, "dtype": dtype, "D": D, "causal": causal}
        for size, dtype, D, causal in itertools.product(
            HOPPER_SIZES, ("bfloat16", "float16", "float32"), (64, 128), (True, False)
        )
        if (dtype != "float32" or D == 64)
        and (
            helpers.on_gpu()
            or (size, dtype, D, causal)
            in (
                ("queries_and_keys", "bfloat16", 128, True),
                ("few_queries", "float32", 64, False),
                ("more_queries_than_keys", "float16", 64, True),
            )
        )
    )
    def test_against_the_oracle(self, size, dtype, D, causal):
        arrays, do = problem(*HOPPER_SIZES[size], B=2 if helpers.on_gpu() else 1, D=D, H=2, HK=1, dtype=dtype)
        precision = "fp32" if dtype == "float32" else "16bit"
        assert_accurate(arrays, do, "pallas_mosaic", precision=precision, causal=causal)

    def test_on_a_gpu_it_gives_the_same_bits_again_and_sees_no_later_token(self):
        if not helpers.on_gpu():
            self.skipTest("interpret mode has nothing that could differ")
        arrays, do = problem(2048, D=128, dtype="bfloat16")
        first = value_and_grads(arrays, do, "pallas_mosaic")
        for _ in range(50):
            helpers.assert_same_bits(value_and_grads(arrays, do, "pallas_mosaic"), first)
        changed = {name: np.array(x) for name, x in arrays.items()}
        for x in changed.values():
            x[:, 1000:] *= -3
        got = value_and_grads(changed, do, "pallas_mosaic")
        helpers.assert_same_bits({"o": got["o"][:, :1000]}, {"o": first["o"][:, :1000]})

    def test_is_traced_under_x64_as_without(self):
        arrays, do = problem(64, D=64, dtype="bfloat16")
        plain = value_and_grads(arrays, do, "pallas_mosaic") if helpers.on_gpu() else {}
        with jax.enable_x64(True):
            if helpers.on_gpu():
                helpers.assert_same_bits(value_and_grads(arrays, do, "pallas_mosaic"), plain)
            else:  # the interpreter itself mixes 32 and 64-bit indices there
                run = functools.partial(value_and_grads, do=do, implementation="pallas_mosaic")
                o = jax.eval_shape(run, arrays)["o"]
                self.assertEqual((o.shape, o.dtype), (arrays["q"].shape, jnp.bfloat16))

    @parameterized.parameters((512, 512, 5, True), (4096, 4096, 33, True), (200, 72, 2, True), (304, 520, 3, False))
    def test_every_tile_of_queries_is_served_once_and_programs_have_like_loads(self, Tq, Tk, H, causal):
        sizes, tiles = Sizes(B=2, Tq=Tq, Tk=Tk, H=H, HK=H, D=128, causal=causal), kernels.HopperTiles(128, 2)
        call = mosaic._Call(sizes, tiles, 0.125, 1, False)
        number = 2 * H * call.query_tiles
        heads, blocks = mosaic.head_and_block(np.arange(number), call.query_tiles, 2 * H, call.walked, np)
        np.testing.assert_array_equal(np.sort(heads * call.query_tiles + blocks), np.arange(number))
        last = np.minimum(128 * (call.query_tiles - blocks), Tq) + Tk - Tq if causal else np.full(number, Tk)
        costs = np.maximum(1, -(-last // 128)) + 0.5
        for programs in (1, 3, min(132, number)):
            table = mosaic._shares(call, programs)
            np.testing.assert_array_equal(np.sort(table[table >= 0]), np.arange(number))
            np.testing.assert_array_equal(table[0], np.arange(programs))
            self.assertTrue((table[-2:] < 0).all())
            loads = np.where(table >= 0, costs[table], 0).sum(axis=0)
            self.assertLessEqual(loads.max() - loads.mean(), max(2.0, 0.02 * loads.mean()))

    @parameterized.named_parameters(
        ("odd", {"T": 20}, "copy tiles of 8 tokens, into which Tq=20 and Tk=20 cannot be cut"),
        ("dim", {"D": 32}, "this is 'fp32' with 32"),
        ("packed", {"segment_ids": np.zeros((2, 64), np.int32)}, "take no packed sequences"),
    )
    def test_refused(self, changes, message):
        options = {"T": 64, "D": 64} | changes
        arrays, _ = problem(options.pop("T"), D=options.pop("D"))
        with helpers.kernels_run("pallas_mosaic"), self.assertRaisesRegex(NotImplementedError, message):
            attention(**arrays, implementation="pallas_mosaic", **options)


class CausalityTest(parameterized.TestCase):
    """What a query does not see it does not depend on, bit for bit."""

    @each(bad=(np.nan, np.inf), few=lambda bad: bad is np.nan)
    def test_keys_and_values_that_are_not_finite(self, implementation, bad):
        T, first = (700, 333) if helpers.on_gpu() else (75, 37)
        arrays, do = problem(T)
        clean = value_and_grads(arrays, do, implementation)
        for spoiled in ("k", "v"):
            x = np.array(arrays[spoiled])
            x[:, first, 1, 3] = bad
            got = value_and_grads(arrays | {spoiled: x}, do, implementation)
            for name in ("o", "dq"):
                before, head = np.s_[:, :first], np.s_[:, first:, :2]  # heads 0 and 1 read key head 0
                helpers.assert_same_bits({name: got[name][before]}, {name: clean[name][before]})
                helpers.assert_same_bits({name: got[name][head]}, {name: clean[name][head]})
            helpers.assert_same_bits({"dk": got["dk"][:, :, 0]}, {"dk": clean["dk"][:, :, 0]})
            if bad is np.nan or spoiled == "v":
                self.assertFalse(np.isfinite(np.asarray(got["o"])[:, first:, 2:, 3]).any())

    @each(few=lambda: True)
    def test_cotangents_that_are_not_finite(self, implementation):
        T, last = (700, 333) if helpers.on_gpu() else (75, 37)
        arrays, do = problem(T)
        clean = value_and_grads(arrays, do, implementation)
        spoiled = np.array(do)
        spoiled[:, last, 0, 3] = np.nan
        got = value_and_grads(arrays, spoiled, implementation)
        for name in ("dk", "dv"):  # later keys have nothing to do with that query
            helpers.assert_same_bits({name: got[name][:, last + 1 :]}, {name: clean[name][:, last + 1 :]})
        self.assertTrue(np.isnan(np.asarray(got["dv"])[:, : last + 1, 0, 3]).all())

    @each(few=lambda: True)
    def test_later_tokens_change_no_bit(self, implementation):
        T, first = (700, 333) if helpers.on_gpu() else (75, 37)
        arrays, do = problem(T)
        do = np.array(do)
        do[:, first:] = 0
        clean = value_and_grads(arrays, do, implementation)
        changed = {name: np.array(x) for name, x in arrays.items()}
        for x in changed.values():
            x[:, first:] *= -3
        got = value_and_grads(changed, do, implementation)
        helpers.assert_same_bits({"o": got["o"][:, :first]}, {"o": clean["o"][:, :first]})
        for name in ("dq", "dk", "dv"):
            helpers.assert_same_bits({name: got[name][:, :first]}, {name: clean[name][:, :first]})
            self.assertFalse(np.asarray(got[name])[:, first:].any(), name)

    @each(few=lambda: False)
    def test_queries_that_see_nothing_give_zeros_whatever_they_are(self, implementation):
        arrays, do = problem(75, 40)
        q, d = np.array(arrays["q"]), np.array(do)
        q[:, :35], d[:, :35] = np.nan, np.inf
        got = value_and_grads(arrays | {"q": q}, d, implementation)
        clean = value_and_grads(arrays, do, implementation)
        self.assertFalse(np.asarray(got["o"])[:, :35].any())
        self.assertFalse(np.asarray(got["dq"])[:, :35].any())
        for name in ("dk", "dv"):
            helpers.assert_same_bits({name: got[name]}, {name: clean[name]})


LENGTHS = {
    "of_all_kinds": (0, 1, 16, 31, 0, 27),
    "all_of_one_token": (1,) * 20,
    "all_in_one": (0, 0, 75, 0),
}
if helpers.on_gpu():
    LENGTHS |= {"long": (0, 1, 63, 64, 65, 0, 517, 128, 2, 900)}


class PackedTest(parameterized.TestCase):
    """Sequences packed one after the other see nothing of each other."""

    @each(
        lengths=tuple(LENGTHS),
        causal=(True, False),
        few=lambda lengths, causal: lengths == "of_all_kinds" and not causal,
    )
    def test_cu_seqlens(self, implementation, lengths, causal):
        cu_seqlens = np.cumsum((0, *LENGTHS[lengths])).astype(np.int32)
        arrays, do = problem(int(cu_seqlens[-1]), B=1)
        assert_accurate(arrays, do, implementation, causal=causal, cu_seqlens=cu_seqlens)

    @each(causal=(True, False), few=lambda causal: causal)
    def test_segment_ids(self, implementation, causal):
        T = 1003 if helpers.on_gpu() else 75
        arrays, do = problem(T)
        ids = np.stack(
            [np.repeat([4, 9, 4], (T - 30, 20, 10)), np.arange(T) // 33]
        )  # an id that comes again is another
        assert_accurate(arrays, do, implementation, causal=causal, segment_ids=ids)

    @each(few=lambda: False)
    def test_in_16_bit(self, implementation):
        lengths = LENGTHS["long" if helpers.on_gpu() else "of_all_kinds"]
        cu_seqlens = np.cumsum((0, *lengths))
        arrays, do = problem(int(cu_seqlens[-1]), B=1, D=128, dtype="bfloat16")
        assert_accurate(arrays, do, implementation, precision="16bit", cu_seqlens=cu_seqlens)

    @each(few=lambda: False)
    def test_every_sequence_empty(self, implementation):
        arrays, do = problem(0, B=1)
        got = value_and_grads(arrays, do, implementation, cu_seqlens=np.array([0, 0, 0]))
        self.assertEqual({name: x.shape for name, x in got.items()}["o"], (1, 0, 4, 20))

    @each(few=lambda: True)
    def test_one_program_serves_all_packings_and_not_a_number_stays_in_its_sequence(self, implementation):
        arrays, do = problem(75, B=1)
        run = jax.jit(lambda arrays, cu: value_and_grads(arrays, do, implementation, cu_seqlens=cu))
        for lengths in ((5, 0, 30, 40), (0, 75, 0, 0), (13, 13, 13, 36)):
            cu_seqlens = np.cumsum((0, *lengths)).astype(np.int32)
            got = run(arrays, cu_seqlens)
            helpers.assert_all_close(got, attention_oracle(**arrays, cu_seqlens=cu_seqlens, do=do))
        self.assertEqual(run._cache_size(), 1)
        spoiled = {name: np.array(x) for name, x in arrays.items()}
        for x in spoiled.values():
            x[:, 13:26] = np.nan
        found = run(spoiled, cu_seqlens)
        for name, x in found.items():
            self.assertTrue(np.isnan(np.asarray(x)[:, 13:26]).all(), name)
            others = [{name: np.delete(np.asarray(y), np.s_[13:26], axis=1)} for y in (x, got[name])]
            helpers.assert_same_bits(*others)


class TransformTest(parameterized.TestCase):
    """Inside JAX's transformations a call gives what it gives outside."""

    @each(few=lambda: False)
    def test_vmap(self, implementation):
        (one, do), (two, do2) = problem(24, B=1), problem(24, B=1, seed=1)
        arrays = {"q": np.stack([one["q"], two["q"]]), "k": one["k"], "v": np.stack([one["v"], two["v"]])}
        axes = {"q": 0, "k": None, "v": 0}

        def fn(arrays):
            return jax.vmap(lambda x: attention(**x, implementation=implementation), (axes,))(arrays)

        with helpers.kernels_run(implementation):
            o, vjp = jax.vjp(fn, jax.tree.map(jnp.asarray, arrays))
            (grads,) = vjp(jnp.stack([do, do2]))
        wants = [
            attention_oracle(**{n: x if axes[n] is None else x[i] for n, x in arrays.items()}, do=d)
            for i, d in enumerate((do, do2))
        ]
        want = {n: np.stack([w[n] for w in wants]) for n in wants[0]}
        want["dk"] = want["dk"].sum(axis=0)
        helpers.assert_all_close({"o": o} | {f"d{n}": g for n, g in grads.items()}, want)

    @each(few=lambda: False)
    def test_gradients_in_a_scan_under_jit_and_checkpoint(self, implementation):
        arrays, do = problem(24)
        want = attention_oracle(**arrays, do=do)

        @jax.jit
        @jax.grad
        def total(v):
            def layer(v):
                return jnp.vdot(attention(arrays["q"], arrays["k"], v, implementation=implementation), do)

            return jax.lax.scan(lambda c, v: (c + jax.checkpoint(layer)(v), None), 0.0, v)[0]

        with helpers.kernels_run(implementation):
            dv = total(jnp.stack([arrays["v"], 2 * arrays["v"]]))
        helpers.assert_close(dv[1], want["dv"], rms=1e-5)

    @each(few=lambda: True)
    def test_shard_map_over_batch_and_heads(self, implementation):
        arrays, do = problem(24, B=2, H=4, HK=2)
        n = 2 if len(jax.devices()) >= 4 else 1
        mesh = jax.make_mesh((n, n), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        spec = PartitionSpec("b", None, "h")
        fn = jax.shard_map(
            functools.partial(attention, implementation=implementation),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        with helpers.kernels_run(implementation):
            o, vjp = jax.vjp(jax.jit(fn), *arrays.values())
            grads = vjp(jnp.asarray(do))
        got = dict(zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True))
        helpers.assert_all_close(got, attention_oracle(**arrays, do=do))


class DispatchTest(parameterized.TestCase):
    def test_explain_says_what_runs(self):
        arrays, do = problem(24)
        with helpers.kernels_run("pallas_triton"):
            calls = dormouse_jax.explain(
                lambda q, k, v: jax.vjp(lambda *x: attention(*x, implementation="pallas"), q, k, v)[1](do),
                *arrays.values(),
            )
        forward, backward = calls
        self.assertEqual((forward.operator, forward.direction), ("attention", "forward"))
        self.assertEqual(forward.implementation, "pallas_triton")
        self.assertEqual(forward.kernels, ("attention_forward",))
        self.assertEqual(backward.kernels, ("attention_dkv", "attention_dq"))

    def test_on_hopper_its_kernels_are_the_default(self):
        device = dispatch.Device("gpu", "NVIDIA H200", "9.0", 132)
        for D, chosen in ((64, "pallas_mosaic"), (32, "pallas_triton")):
            arrays, _ = problem(64, D=D)
            with mock.patch.dict(attention.__globals__, device_of=lambda *arrays: device):
                (call,) = dormouse_jax.explain(attention, *arrays.values())
            self.assertEqual(call.implementation, chosen)


class PortTest(parameterized.TestCase):
    """PyTorch's operator and the composite compute what the oracle does."""

    @parameterized.product(port=(torch_attention, attention_composite), causal=(True, False), Tk=(30, 47))
    def test_against_the_oracle(self, port, causal, Tk):
        arrays, do = problem(30, Tk)
        tensors = [torch.from_numpy(x).requires_grad_() for x in arrays.values()]
        o = port(*tensors, causal=causal)
        grads = torch.autograd.grad(o, tensors, torch.from_numpy(do))
        got = {"o": o.detach()} | {f"d{name}": g for name, g in zip(arrays, grads, strict=True)}
        helpers.assert_all_close(got, attention_oracle(**arrays, causal=causal, do=do))


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


class ErrorsTest(parameterized.TestCase):
    """Calls that cannot be served: what is raised, and what it says."""

    @parameterized.named_parameters(
        ("q_is_a_list", {"q": [[1.0]]}, TypeError, "q must be an array, got list"),
        ("q_of_three_axes", {"q": ones(2, 8, 4)}, ValueError, "q must have shape [B, Tq, H, D], got [2, 8, 4]"),
        (
            "k_of_another_dim",
            {"k": ones(2, 8, 2, 5)},
            ValueError,
            "k must have shape [B, Tk, HK, D] = [2, Tk, HK, 4], got [2, 8, 2, 5]",
        ),
        (
            "v_of_another_length",
            {"v": ones(2, 9, 2, 4)},
            ValueError,
            "v must have shape [B, Tk, HK, D] = [2, 8, 2, 4], got [2, 9, 2, 4]",
        ),
        ("no_query", {"q": ones(2, 0, 4, 4)}, ValueError, "Tq and Tk must be at least 1, got q of shape [2, 0, 4, 4]"),
        (
            "heads_do_not_divide",
            {"q": ones(2, 8, 3, 4)},
            ValueError,
            "H must be a multiple of HK, got q with H = 3 and k with HK = 2",
        ),
        (
            "a_large_dim",
            {name: ones(1, 8, 2, 257) for name in "qkv"},
            ValueError,
            "D, the last axis of q, must be from 1 to 256, got 257",
        ),
        ("integers", {"q": ones(2, 8, 4, 4, dtype=np.int32)}, TypeError, "q must be float32, bfloat16 or float16"),
        ("mixed", {"v": ones(2, 8, 2, 4, dtype=np.float16)}, TypeError, "v must have q's dtype float32, got float16"),
        ("causal_is_a_string", {"causal": "yes"}, ValueError, "causal must be one of False, True, got 'yes'"),
        ("scale_is_a_string", {"scale": "big"}, TypeError, "scale must be a Python number, got str"),
        ("scale_is_zero", {"scale": 0}, ValueError, "scale must be a positive finite number, got 0"),
        ("scale_is_inf", {"scale": np.inf}, ValueError, "scale must be a positive finite number, got inf"),
        ("unknown_precision", {"precision": "high"}, ValueError, "precision must be one of None, 'fp32'"),
        (
            "precision_of_16_bit",
            {"precision": "16bit"},
            ValueError,
            "precision must be 'fp32' or 'tf32' for inputs of dtype float32, got '16bit'",
        ),
        ("unknown_implementation", {"implementation": "flash"}, ValueError, "implementation must be one of None"),
        (
            "packed_twice",
            {"segment_ids": ones(2, 8, dtype=np.int32), "cu_seqlens": np.array([0, 8])},
            ValueError,
            "segment_ids must be None with cu_seqlens",
        ),
        (
            "ids_of_another_length",
            {"segment_ids": ones(2, 9, dtype=np.int32)},
            ValueError,
            "segment_ids must have shape [B, T] = [2, 8], got [2, 9]",
        ),
        (
            "packed_of_two_lengths",
            {"q": ones(2, 7, 4, 4), "segment_ids": ones(2, 7, dtype=np.int32)},
            ValueError,
            "Tq and Tk must be equal with segment_ids, got 7 and 8",
        ),
        ("batch_of_packed", {"cu_seqlens": np.array([0, 8])}, ValueError, "B must be 1 with cu_seqlens"),
    )
    def test_refused(self, changes, error, message):
        arguments = {"q": ones(2, 8, 4, 4), "k": ones(2, 8, 2, 4), "v": ones(2, 8, 2, 4)} | changes
        with self.assertRaises(error) as caught:
            attention(**arguments)
        self.assertStartsWith(str(caught.exception), f"attention: {message}")

    @parameterized.parameters("pallas", "pallas_triton", "pallas_mosaic")
    def test_kernels_by_name_without_a_gpu(self, implementation):
        if helpers.on_gpu():
            self.skipTest("there is a GPU")
        with self.assertRaisesRegex(NotImplementedError, f"attention: implementation='{implementation}' cannot serve"):
            attention(ones(2, 8, 4, 4), ones(2, 8, 2, 4), ones(2, 8, 2, 4), implementation=implementation)


if __name__ == "__main__":
    absltest.main()
