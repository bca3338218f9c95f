"""The KDA kernels themselves: intermediates against the PyTorch port by name, and every configuration of the table."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized

import dormouse_jax
from dormouse_jax import packing
from pallas_kernels import kda as kernels
from pallas_kernels.kda import mosaic_prepare
from tests import helpers
from tests.helpers import OPERATORS, Shape
from torch_ref import kda as port

SHAPE = Shape(B=2, T=41, H=1, HV=2, K=20, V=24)
PRECISIONS = ("16bit", "fp32", "tf32")
TILES = ("W", "Qhat", "Ktil", "Y", "P", "M", "decay")
INTERMEDIATES = ("G", "A", "P", "M", "W", "U", "states")


def arguments(p):
    """The problem's inputs as the kernels take them: q, k, v, g, erase, write, initial_state."""
    x = {"write": None, "initial_state": p.initial_state} | {n.replace("beta", "erase"): x for n, x in p.inputs.items()}
    arrays = (x[name] for name in ("q", "k", "v", "g", "erase", "write", "initial_state"))
    return tuple(None if x is None else jnp.asarray(x) for x in arrays)


def given(p, config):
    """The arrays and the options of the problem that the kernels take by name."""
    cu_seqlens, found = p.options.get("cu_seqlens"), {}
    if cu_seqlens is not None:
        chunks = packing.chunks(jnp.asarray(cu_seqlens), p.do.shape[1], config.chunk_size)
        found["packing"] = kernels.Packing(chunks.rows, jnp.stack([chunks.first, jnp.asarray(cu_seqlens)], axis=1))
    found |= {name: jnp.asarray(p.inputs[name]) for name in ("A_log", "dt_bias") if name in p.inputs}
    names = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "lower_bound", "use_beta_sigmoid_in_kernel")
    return found, kernels.Raw(*(p.options.get(name) for name in names), p.options.get("allow_neg_eigval", False))


def config_for(precision, shape=SHAPE, chunk_size=None):
    """The table's configuration, with Triton's kernels, which take every shape."""
    config = kernels.choose_config(
        jax.devices()[0].device_kind,
        K=shape.K,
        V=shape.V,
        T=shape.T,
        batch_heads=shape.B * shape.HV,
        precision=precision,
        chunk_size=chunk_size,
    )
    return config.on_triton()


def value_and_grads(p, precision, config, *, save):
    """As `helpers.value_and_grads`, straight from the kernels."""
    return program(p, precision, config, save=save)(p)


def program(p, precision, config, *, save):
    """`value_and_grads` as a function of problems that have the shapes and options of p: compiled once."""
    _, raw = given(p, config)
    scale, interpret = p.inputs["q"].shape[-1] ** -0.5, not helpers.on_gpu()
    options = {"scale": scale, "precision": precision, "config": config, "interpret": interpret, "raw": raw}

    @jax.jit
    def run(inputs, named, do, dfinal_state):
        o, final_state, residuals = kernels.forward(*inputs, save=save, **named, **options)
        grads = kernels.backward(*inputs, residuals, do, dfinal_state, o=o, **named, **options)
        return o, final_state, grads

    def call(p):
        named, _ = given(p, config)
        o, final_state, grads = run(arguments(p), named, jnp.asarray(p.do), jnp.asarray(p.dfinal_state))
        gates = [name for name in ("A_log", "dt_bias") if name in named]
        names = [name for name in p.inputs if name not in named] + gates
        found = [d for d in grads if d is not None]
        return {"o": o, "final_state": final_state} | dict(
            zip([f"d{name}" for name in [*names, "initial_state"]], found, strict=True)
        )

    return call


def port_intermediates(p, chunk_size, dtype, matmul_dtype=None):
    fn = port.chunk_kda if p.operator == "kda" else port.chunk_gdn2
    inputs = (torch.tensor(np.asarray(x, np.float64)).to(dtype) for x in p.inputs.values())
    state = torch.tensor(np.asarray(p.initial_state, np.float64)).to(dtype)
    _, _, found = fn(
        *inputs, initial_state=state, chunk_size=chunk_size, matmul_dtype=matmul_dtype, return_intermediates=True
    )
    return {name: found[name].double().numpy() for name in INTERMEDIATES}


@functools.cache
def compiled_intermediates(config, precision):
    options = {"scale": SHAPE.K**-0.5, "precision": precision, "config": config, "interpret": not helpers.on_gpu()}
    return jax.jit(functools.partial(kernels.forward_intermediates, **options))


class IntermediatesTest(parameterized.TestCase):
    """Tensor for tensor, by name, against the chunked PyTorch port."""

    @parameterized.named_parameters(
        (f"{operator}_{precision}_{chunk_size}", operator, precision, chunk_size)
        for operator, precision, chunk_size in itertools.product(OPERATORS, ("fp32", "tf32", "16bit"), (16, 32))
        if helpers.on_gpu() or (operator, precision, chunk_size) in (("kda", "fp32", 32), ("gdn2", "16bit", 16))
    )
    def test_against_the_port(self, operator, precision, chunk_size):
        dtype = jnp.bfloat16 if precision == "16bit" else jnp.float32
        p = helpers.problem(operator, SHAPE, dtype=dtype)
        got = compiled_intermediates(config_for(precision, chunk_size=chunk_size), precision)(*arguments(p))
        want = port_intermediates(p, chunk_size, torch.float64)
        self.assertContainsSubset(INTERMEDIATES, got)
        for name in INTERMEDIATES:
            bar = {"fp32": 2e-6, "tf32": 2e-3, "16bit": 8e-3}[precision]
            if name == "G":  # Far better than the operands: an error of G is a relative error of every decay.
                bar = 2e-7 if precision == "fp32" else 2e-5
            helpers.assert_close(got[name], want[name], rms=bar, name=name)

    def test_strong_gates_and_repeated_keys(self):
        p = helpers.problem("kda", SHAPE)
        g = np.where(np.random.default_rng(0).random(p.inputs["g"].shape) < 1 / 3, -50.0, p.inputs["g"])
        k = np.repeat(p.inputs["k"][:, :1], SHAPE.T, axis=1)
        p = p.replace(k=k, g=g, beta=np.ones_like(p.inputs["beta"]))
        got = compiled_intermediates(config_for("fp32", chunk_size=32), "fp32")(*arguments(p))
        want = port_intermediates(p, 32, torch.float64)
        for name in INTERMEDIATES:
            helpers.assert_close(got[name], want[name], rms=2e-6, name=name)


class ConfigurationTest(parameterized.TestCase):
    @parameterized.named_parameters(*((x, x) for x in (OPERATORS if helpers.on_gpu() else OPERATORS[:1])))
    def test_the_exact_path_changes_no_bit(self, operator):
        # Gates that send some rows of some blocks to the exact path, and leave whole blocks on the fast one.
        p = helpers.problem(operator, SHAPE)
        g = np.array(p.inputs["g"])
        g[:, 5] = -40.0
        g[:, 20:23] = -9.0
        p = p.replace(g=g)
        config = config_for("fp32", chunk_size=16)
        results = [
            value_and_grads(p, "fp32", dataclasses.replace(config, always_exact=exact), save=True)
            for exact in (False, True)
        ]
        helpers.assert_all_close(results[0], helpers.oracle(p))
        if helpers.on_gpu():
            # Two programs, which the compiler may contract into multiply-adds differently. Within one program, that a
            # later row's path changes no bit is what the causality tests show.
            for name, value in results[0].items():
                helpers.assert_close(results[1][name], np.asarray(value, np.float64), rms=1e-6, name=name)
        else:
            helpers.assert_same_bits(*results)

    @parameterized.named_parameters(*((x, x) for x in (OPERATORS if helpers.on_gpu() else OPERATORS[:1])))
    def test_a_split_sequence_against_the_oracle(self, operator):
        config = dataclasses.replace(config_for("fp32", chunk_size=16), v_tile=16, segments=2)
        p = helpers.problem(operator, Shape(T=261, K=16, V=32, H=1, HV=1))
        self.assertEqual(config.segments_of(17), 2)
        helpers.assert_all_close(value_and_grads(p, "fp32", config, save=False), helpers.oracle(p))

    @parameterized.parameters(*itertools.product(OPERATORS, PRECISIONS, (16, 64, 100, 128, 256), (None, 16, 32)))
    def test_every_configuration_that_can_be_chosen_against_the_oracle(self, operator, precision, dim, chunk_size):
        # A configuration can be miscompiled: none may be chosen that has not been held to the oracle on the device.
        if not helpers.on_gpu():
            self.skipTest("it is about compiled kernels; interpreted ones ignore most of a configuration")

        def found(chunk_size):
            heads = (1, 8, 32, 64, 128, 256, 1024)
            return {config_for(precision, Shape(T=8192, K=dim, V=dim, HV=many), chunk_size) for many in heads}

        configs = found(chunk_size) - (found(None) if chunk_size else set())
        for config in sorted(configs, key=str):
            T = 150 if config.segments == 1 else config.segments * 9 * config.chunk_size + 7
            for dtype in ("bfloat16", "float16") if precision == "16bit" else ("float32",):
                with self.subTest(dtype=dtype, config=str(config)):
                    p = helpers.problem(operator, Shape(T=T, K=dim, V=dim, H=1, HV=2), dtype=jnp.dtype(dtype))
                    got = value_and_grads(p, precision, config, save=True)
                    helpers.assert_all_close(got, helpers.oracle(p), precision=precision)

    @parameterized.parameters(
        *itertools.product(("raw", "raw_and_full", "packed", "packed_and_raw"), PRECISIONS, (64, 100, 128, 256))
    )
    def test_every_default_configuration_with_raw_and_packed_inputs(self, kind, precision, dim):
        if not helpers.on_gpu():
            self.skipTest("it is about compiled kernels; interpreted ones ignore most of a configuration")
        # Raw inputs change the parallel kernels alone, whose part of a configuration hardly varies.
        parts = ("chunk_size", "k_tile", "prepare_warps", "grads_warps")
        parts += ("v_tile", "state_warps", "state_bwd_warps") if kind == "packed" else ()
        configs = {}
        for many in (1, 32, 64):
            config = config_for(precision, Shape(T=8192, K=dim, V=dim, HV=many))
            configs[tuple(getattr(config, part) for part in parts)] = config
        dtypes = ("bfloat16", "float16") if precision == "16bit" and dim == 128 else ("bfloat16",)
        for config in configs.values():
            config = dataclasses.replace(config.on_triton(), segments=1)
            for dtype in dtypes if precision == "16bit" else ("float32",):
                with self.subTest(dtype=dtype, config=str(config)):
                    shape = Shape(T=160 if kind == "raw_and_full" else 150, K=dim, V=dim, H=1, HV=2)
                    if kind.startswith("packed"):
                        p = helpers.packed("kda", (0, 1, 16, 63, 0, 64, 17), shape, dtype=jnp.dtype(dtype))
                    else:
                        p = helpers.problem("kda", shape, dtype=jnp.dtype(dtype))
                    p = helpers.raw(p, "l2norm", "gate", "beta", decay=0.1) if "raw" in kind else p
                    got = value_and_grads(p, precision, config, save=False)
                    helpers.assert_all_close(got, helpers.oracle(p), precision=precision)

    @parameterized.named_parameters(
        (f"{operator}_{K}_{V}_{chunk_size}", operator, K, V, chunk_size)
        for operator, K, V, chunk_size in itertools.product(
            OPERATORS, (40, 64, 100, 128), (64, 128, 256), (None, 16, 32)
        )
        if (K, V) in ((40, 64), (64, 64), (64, 256), (100, 128), (128, 128), (128, 256))
        and (helpers.on_gpu() or (operator, K, V, chunk_size) == ("kda", 40, 64, 16))
    )
    def test_the_serial_kernels_for_hopper_against_the_oracle(self, operator, K, V, chunk_size):
        dtypes = (jnp.bfloat16, jnp.float16) if helpers.on_gpu() else (jnp.bfloat16,)
        for dtype, save in itertools.product(dtypes, (False, True) if helpers.on_gpu() else (False,)):
            with self.subTest(dtype=dtype, save=save):
                # Five chunks, more than are in shared memory at a time, and a last one that is not full.
                shape = Shape(T=152 if helpers.on_gpu() else 72, K=K, V=V, H=1, HV=2 if helpers.on_gpu() else 1)
                self.assertIsNone(kernels.hopper_refusal(K=K, V=V, T=shape.T, precision="16bit"))
                config = dataclasses.replace(config_for("16bit", shape, chunk_size), serial="mosaic")
                p = helpers.problem(operator, shape, dtype=dtype)
                got = value_and_grads(p, "16bit", config, save=save)
                helpers.assert_all_close(got, helpers.oracle(p), precision="16bit")

    @parameterized.named_parameters(
        (f"{operator}_{K}_{V}_{chunk_size}", operator, K, V, chunk_size)
        for operator, (K, V), chunk_size in itertools.product(OPERATORS, ((40, 64), (64, 64), (64, 128)), (16, 32))
        if helpers.on_gpu() or (operator, K, V, chunk_size) == ("kda", 40, 64, 16)
    )
    def test_the_serial_kernels_for_hopper_in_float32(self, operator, K, V, chunk_size):
        # Five chunks, more than are in shared memory at a time, and a last one that is not full.
        shape = Shape(T=152 if helpers.on_gpu() else 72, K=K, V=V, H=1, HV=2 if helpers.on_gpu() else 1)
        self.assertIsNone(kernels.hopper_refusal(K=K, V=V, T=shape.T, precision="fp32"))
        config = dataclasses.replace(config_for("fp32", shape, chunk_size), serial="mosaic")
        p = helpers.problem(operator, shape)
        for save in (False, True) if helpers.on_gpu() else (False,):
            with self.subTest(save=save):
                helpers.assert_all_close(value_and_grads(p, "fp32", config, save=save), helpers.oracle(p))

    @parameterized.named_parameters(
        (f"{K}_{V}_{chunk_size}", K, V, chunk_size)
        for K, V, chunk_size in itertools.product((64, 128), (64, 128, 256), (16, 32))
        if helpers.on_gpu() or (K, V, chunk_size) == (64, 64, 32)
    )
    def test_the_kernels_of_a_chunk_for_hopper_against_the_oracle(self, K, V, chunk_size):
        shape = Shape(T=152 if helpers.on_gpu() else 40, K=K, V=V, H=2 if helpers.on_gpu() else 1, HV=0)
        shape = dataclasses.replace(shape, HV=shape.H)
        config = config_for("16bit", shape, chunk_size)
        p = helpers.problem("kda", shape, dtype=jnp.bfloat16)
        # Some rows of some blocks are off the fast path.
        g = np.array(p.inputs["g"])
        g[:, 5] = -80.0
        g[:, 20:23] = -30.0
        p = p.replace(g=g)
        kinds = [("mosaic", "triton", False)]
        if helpers.on_gpu():
            kinds += [("triton", "mosaic", True), ("mosaic", "mosaic", False)]
        for prepare, serial, save in kinds:
            with self.subTest(prepare=prepare, serial=serial, save=save):
                config = dataclasses.replace(config, prepare=prepare, gradients="mosaic", serial=serial)
                got = value_and_grads(p, "16bit", config, save=save)
                helpers.assert_all_close(got, helpers.oracle(p), precision="16bit")

    @parameterized.parameters(*itertools.product((16, 32), (False, True) if helpers.on_gpu() else (False,)))
    def test_slow_rows_in_the_preparation_for_hopper(self, chunk_size, wide):
        """Tiles with fast and slow rows in one block, blocks that have one kind alone, and channels of which few or all
        are deep: right, the same however later rows are, and for fast rows the same whether or not slow ones are looked
        for."""
        T, K, V = 128, 128 if wide else 64, 64
        p = helpers.problem("kda", Shape(B=1, T=T, K=K, V=V, H=1, HV=1), dtype=jnp.bfloat16, decay=0.2)
        q, k, v, g, beta = (np.array(x) for x in p.inputs.values())
        beta = beta.astype(np.float32)
        g[:, 5], g[:, 20:23], g[:, 31] = -80.0, -30.0, -np.inf
        g[:, 48:80:3, :, 7] = -50.0
        g[:, 80:96] *= 100.0
        config = dataclasses.replace(config_for("16bit", Shape(T=T, K=K, V=V), chunk_size), prepare="mosaic")
        options = {"scale": 1.0, "interpret": not helpers.on_gpu()}

        @functools.partial(jax.jit, static_argnums=0)
        def tiles(always, *inputs):
            of = dataclasses.replace(config, always_exact=always)
            found = dict(zip(TILES, mosaic_prepare.prepare(*inputs, config=of, **options)[: len(TILES)], strict=True))
            return found | {"Y": found["Y"].swapaxes(-1, -2), "decay": found["decay"][..., 0, :]}

        got = tiles(False, q, k, v, g, beta)
        decayed = np.maximum(g.astype(np.float64), -127.0)
        want = {name: [] for name in TILES}
        for start in range(0, T, chunk_size):
            q_c, k_c, v_c, g_c, beta_c = (
                x[0, start : start + chunk_size, 0].astype(np.float64) for x in (q, k, v, decayed, beta[..., None])
            )
            G = np.cumsum(g_c, axis=0)
            decays = np.exp(np.minimum(G[:, None] - G[None], 0.0))
            A = np.tril(np.einsum("ic,jc,ijc->ij", beta_c * k_c, k_c, decays), -1)
            M = np.linalg.inv(np.eye(chunk_size) + A)
            found = {"P": np.tril(np.einsum("ic,jc,ijc->ij", q_c, k_c, decays)), "M": M, "Y": M @ (beta_c * v_c)}
            found |= {"W": M @ (beta_c * k_c * np.exp(G)), "Qhat": q_c * np.exp(G), "Ktil": k_c * np.exp(G[-1] - G)}
            for name, value in (found | {"decay": np.exp(G[-1])}).items():
                want[name].append(value)
        for name, value in want.items():
            helpers.assert_close(got[name][0], np.stack(value), rms=1e-5 if name == "decay" else 6e-3, name=name)
        always = tiles(True, q, k, v, g, beta)
        if helpers.on_gpu():
            for name, value in got.items():
                helpers.assert_close(always[name], np.asarray(value, np.float64), rms=1e-6, name=name)
        else:
            helpers.assert_same_bits(got, always)
        # Later rows that become deep; and those that are no numbers, which may reach all of their chunk.
        first = 103
        for value, clean in ((-60.0, first), (np.nan, 96)):
            changed = [np.array(x) for x in (q, k, v, g, beta)]
            for x in changed[:3]:
                x[:, first:] *= value
            changed[3][:, first:] = value
            found = tiles(False, *changed)
            for name in ("P", "M", "W", "Qhat", "Y"):
                before, after = (np.asarray(x[name], np.float32)[0].reshape(T, -1)[:clean] for x in (got, found))
                np.testing.assert_array_equal(after, before, err_msg=f"{name} {value}")

    @parameterized.parameters("float32", "bfloat16")
    def test_the_kernels_for_hopper_leave_the_next_sequence_alone(self, dtype):
        """A tile of one head of 64 columns is contiguous, and its copy would go on behind the last token."""
        shape = Shape(B=3, T=152 if helpers.on_gpu() else 24, K=64, V=64, H=1, HV=1)
        precision = "fp32" if dtype == "float32" else "16bit"
        config = dataclasses.replace(config_for(precision, shape, 32), serial="mosaic")
        config = config if dtype == "float32" else dataclasses.replace(config, prepare="mosaic", gradients="mosaic")
        p = helpers.problem("kda", shape, dtype=jnp.dtype(dtype))
        run, want = program(p, precision, config, save=False), helpers.oracle(p)
        for _ in range(20 if helpers.on_gpu() else 1):  # Whose copy comes last is chance.
            helpers.assert_all_close(run(p), want, precision=precision)

    @parameterized.named_parameters(
        ("gate_and_norm", ("l2norm", "gate", "beta"), "bfloat16", 64, 16),
        ("bounded", ("l2norm", "bounded_gate", "beta_to_2"), "float32", 128, 32),
    )
    def test_the_kernels_of_a_chunk_for_hopper_with_raw_inputs(self, kinds, dtype_of_g, dim, chunk_size):
        shape = Shape(T=152 if helpers.on_gpu() else 40, K=dim, V=64, H=2, HV=2)
        p = helpers.raw(helpers.problem("kda", shape, dtype=jnp.bfloat16), *kinds, decay=0.1)
        p = p.replace(g=p.inputs["g"].astype(jnp.dtype(dtype_of_g)))
        config = config_for("16bit", shape, chunk_size)
        kinds = [("mosaic", "triton", False)]
        if helpers.on_gpu():
            kinds += itertools.product(("triton", "mosaic"), ("mosaic",), (False, True))
        for prepare, serial, save in kinds:
            with self.subTest(prepare=prepare, serial=serial, save=save):
                config = dataclasses.replace(config, prepare=prepare, gradients="mosaic", serial=serial)
                got = value_and_grads(p, "16bit", config, save=save)
                helpers.assert_all_close(got, helpers.oracle(p), precision="16bit")


class Float32HopperTest(parameterized.TestCase):
    """The kernels of one chunk for Hopper with float32-accurate products, as the table has them."""

    def config(self, shape):
        """The configuration that is chosen for Hopper, whatever the number of heads."""
        sizes = {"K": shape.K, "V": shape.V, "T": shape.T}
        found = {
            kernels.choose_config("NVIDIA H200", **sizes, batch_heads=many, precision="fp32")
            for many in (1, 8, 32, 64, 128, 256, 1024)
        }
        self.assertLen(found, 1)
        config = found.pop()
        self.assertEqual({config.prepare, config.gradients, config.serial}, {"mosaic"})
        of_chunk = {"same_heads": True, "dtype": "float32", "plain": True, "chunk_size": config.chunk_size}
        self.assertIsNone(kernels.hopper_chunk_refusal(**sizes, **of_chunk, precision="fp32"))
        return config

    # T of a last chunk that is not full, of one that is, and of no other chunk.
    @parameterized.named_parameters(
        (f"{kind}_{T}", kind, T)
        for kind, T in itertools.product(("weak", "exact_rows", "forgetting", "equal_keys"), (8, 24, 152, 160))
        if helpers.on_gpu() or (kind, T) == ("exact_rows", 24)
    )
    def test_against_the_oracle(self, kind, T):
        many = helpers.on_gpu()
        shape = Shape(B=3 if many else 1, T=T, K=64, V=64, H=2 if many else 1, HV=2 if many else 1)
        config, p = self.config(shape), helpers.problem("kda", shape)
        g = np.array(p.inputs["g"])
        if kind == "exact_rows":  # Of some chunks, some rows, and those of the others on the fast path.
            g[:, 5] = -80.0
            g[:, 20:23, :, ::3] = -30.0
        elif kind == "forgetting":
            g[:, 3:7:2], g[:, 40:41], g[:, 96:98] = -1e4, -np.inf, -50.0
        p = p.replace(g=g)
        if kind == "equal_keys":
            k = np.repeat(p.inputs["k"][:, :1], T, axis=1)
            p = p.replace(k=k, beta=np.ones_like(p.inputs["beta"]))
        want = helpers.oracle(p)
        run = program(p, "fp32", config, save=False)
        got = run(p)
        helpers.assert_all_close(got, want)
        if many:
            for _ in range(20):  # Which chunk is done first, and what it leaves in memory, is chance.
                helpers.assert_same_bits(run(p), got)
            helpers.assert_all_close(value_and_grads(p, "fp32", config, save=True), want)
            config = dataclasses.replace(config, always_exact=True)
            helpers.assert_same_bits(value_and_grads(p, "fp32", config, save=False), got)

    @parameterized.named_parameters(
        (f"{kind}_{residuals}", kind, residuals)
        for kind, residuals in itertools.product(("plain", "segments", "raw_segments"), ("recompute", "save"))
        if helpers.on_gpu() or (kind, residuals) == ("segments", "save")
    )
    def test_a_call_of_the_operator(self, kind, residuals):
        many = helpers.on_gpu()
        p = helpers.problem("kda", Shape(B=2 if many else 1, T=104 if many else 24, K=64, V=64, H=1, HV=1))
        if kind != "plain":
            ids = np.searchsorted((9, 16, 47, 48, 97), np.arange(p.do.shape[1]), side="right")
            ids = np.stack([ids, ids // 2])[: p.do.shape[0]]
            p = dataclasses.replace(p, options={"segment_ids": ids.astype(np.int32)})
        if kind == "raw_segments":
            p = helpers.raw(p, "l2norm", "gate", "beta", decay=0.1)
        call = functools.partial(dormouse_jax.kda, **p.inputs, **p.options, implementation="pallas_mosaic")
        with helpers.kernels_run("pallas_mosaic"):
            (found,) = dormouse_jax.explain(call)
        self.assertEqual((found.config.prepare, found.config.gradients), ("mosaic", "mosaic"))
        got = helpers.value_and_grads(p, "pallas_mosaic", residuals=residuals)
        helpers.assert_all_close(got, helpers.oracle(p))
        if many:  # Where it is Hopper, they are what is chosen.
            helpers.assert_same_bits(helpers.value_and_grads(p, None, residuals=residuals), got)

    @parameterized.named_parameters(
        ("keys", Shape(T=16, K=40, V=64, H=1, HV=1), {}, "K=40"),
        ("values", Shape(T=16, K=64, V=128, H=1, HV=1), {}, "V=128"),
        ("chunk", Shape(T=16, K=64, V=64, H=1, HV=1), {"chunk_size": 32}, "chunks of 32"),
        ("heads", Shape(T=16, K=64, V=64, H=1, HV=2), {}, "more value heads"),
        ("tokens", Shape(T=20, K=64, V=64, H=1, HV=1), {}, "T=20 cannot be cut"),
        ("serial", Shape(T=16, K=64, V=64, H=1, HV=1), {"serial": "triton"}, "serial must be 'mosaic'"),
    )
    def test_what_they_do_not_take(self, shape, change, reason):
        config = dataclasses.replace(self.config(Shape(T=16, K=64, V=64)), **change)
        p = helpers.problem("kda", shape)
        with self.assertRaisesRegex(ValueError, reason):
            value_and_grads(p, "fp32", config, save=False)


# Kernels for Hopper that take packed sequences: the operator, dtypes of the inputs and of g, K and V, the chunk size,
# what comes raw, whether residuals are saved, and lengths for interpret mode.
PACKED_HOPPER = {
    "small": ("kda", "bfloat16", "float32", 64, 64, 32, (), False, (1, 63, 64, 65, 0, 7)),
    "raw": ("kda", "bfloat16", "bfloat16", 64, 64, 16, ("l2norm", "gate", "beta"), True, (5, 0, 16, 27)),
    "float32": ("kda", "float32", "float32", 40, 64, 16, (), False, (5, 0, 16, 27)),
    "large": ("kda", "bfloat16", "float32", 128, 128, 32, (), False, None),
    "large_saving": ("kda", "bfloat16", "float32", 128, 128, 16, (), True, None),
    "large_raw": ("kda", "bfloat16", "bfloat16", 128, 128, 32, ("l2norm", "gate", "beta"), False, None),
    "bounded": ("kda", "bfloat16", "float32", 128, 64, 32, ("l2norm", "bounded_gate", "beta_to_2"), False, None),
    "wide": ("kda", "bfloat16", "bfloat16", 64, 256, 16, (), False, None),
    "float16": ("kda", "float16", "float32", 100, 128, 32, (), False, None),
    "general": ("gdn2", "bfloat16", "float32", 64, 64, 16, (), False, None),
    "float32_saving": ("kda", "float32", "float32", 64, 128, 32, (), True, None),
}


class PackedHopperTest(parameterized.TestCase):
    """Packed sequences in the kernels for Hopper, which copy whole tiles of tokens, whosever they are."""

    # As many tokens and sequences each, so that one program serves them all.
    PACKINGS = ((1, 63, 64, 65, 0, 7), (0, 200, 0, 0, 0, 0), (32, 64, 32, 40, 32, 0), (3, 1, 1, 30, 65, 100))

    @parameterized.named_parameters(
        (name, *case) for name, case in PACKED_HOPPER.items() if helpers.on_gpu() or case[-1]
    )
    def test_against_the_oracle(self, operator, dtype, dtype_of_g, K, V, chunk_size, raw, save, lengths):
        dtype, heads = jnp.dtype(dtype), 2 if helpers.on_gpu() else 1
        packings = self.PACKINGS if helpers.on_gpu() else (lengths,)
        precision = "fp32" if dtype == jnp.float32 else "16bit"
        shape, sizes = Shape(T=0, K=K, V=V, H=heads, HV=heads), {"K": K, "V": V, "T": sum(packings[0])}
        self.assertIsNone(kernels.hopper_refusal(**sizes, precision=precision))
        refusal = kernels.hopper_chunk_refusal(
            **sizes, same_heads=True, dtype=str(dtype), plain=operator == "kda", precision=precision,
            chunk_size=chunk_size, packed=True,
        )  # fmt: skip
        config = config_for(precision, dataclasses.replace(shape, T=sizes["T"]), chunk_size)
        of_chunk = "triton" if refusal else "mosaic"
        config = dataclasses.replace(config, serial="mosaic", gradients=of_chunk, prepare=of_chunk)
        run = None
        for lengths in packings:
            with self.subTest(lengths=lengths):
                p = helpers.packed(operator, lengths, shape, dtype=dtype, gate_dtype=jnp.dtype(dtype_of_g), decay=0.1)
                p = helpers.raw(p, *raw, decay=0.1) if raw else p
                g = np.array(p.inputs["g"])  # Some rows are slow: deep in a few channels, or in all of them.
                g[:, 2::9, :, ::5], g[:, 7::40] = (30.0, 60.0) if raw else (-70.0, -20.0)
                p = p.replace(g=g)
                run = run or program(p, precision, config, save=save)
                got = run(p)
                helpers.assert_all_close(got, helpers.oracle(p), precision=precision)
                if lengths == self.PACKINGS[0]:
                    self.not_a_number_stays_in_its_sequence(run, p, got)

    def not_a_number_stays_in_its_sequence(self, run, p, clean):
        first, end = p.options["cu_seqlens"][2:4]
        mine, others = np.s_[first:end], np.array([0, 1, 3, 4, 5])
        poisoned = {n: np.array(x, np.float32) for n, x in p.inputs.items() if n not in ("A_log", "dt_bias")}
        poisoned["do"] = np.array(p.do, np.float32)
        for x in poisoned.values():
            x[:, mine] = np.nan
        got = run(p.replace(**poisoned))
        for name in set(got) - {"dA_log", "ddt_bias"}:
            of_state = name.endswith("_state")
            parts = [x[others] if of_state else np.delete(x, mine, axis=1) for x in (got[name], clean[name])]
            helpers.assert_same_bits({name: parts[0]}, {name: parts[1]})
            self.assertTrue(np.isnan(np.asarray(got[name][2] if of_state else got[name][:, mine], np.float32)).any())


if __name__ == "__main__":
    absltest.main()
