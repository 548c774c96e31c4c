"""Tests descriptions of clusters: text, TOML, meshes and local devices."""

import dataclasses
import doctest
import math
import pathlib
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar.cluster.cluster as cluster_module
import autopar.cluster.mesh as mesh_module
import autopar.cluster.text as text_module
import autopar.profiling.kernels as fit_module
from autopar.cluster import (
    Cluster,
    ClusterError,
    CollectiveFit,
    DeviceSpec,
    Level,
    LinkSpec,
)
from autopar.cluster.presets import (
    NETWORK_EFFICIENCY,
    PRESETS,
    USABLE_MEMORY,
)
from autopar.cluster.text import format_quantity, parse_quantity

ROOT = pathlib.Path(__file__).parents[3]
presets = st.sampled_from(sorted(PRESETS))
shapes = st.lists(st.integers(1, 12), min_size=1, max_size=3)
positive = st.floats(1e-9, 1e18, allow_nan=False)


@pytest.mark.parametrize(
    "module", [cluster_module, fit_module, mesh_module, text_module]
)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


class TestParse:
    @given(shapes, presets)
    def test_round_trip(self, sizes, name):
        text = f"{'x'.join(map(str, sizes))}:{name}"
        cluster = Cluster.parse(text)
        assert str(cluster) == text
        assert Cluster.parse(str(cluster)) == cluster
        assert cluster.num_devices == math.prod(sizes)
        assert tuple(level.size for level in cluster.levels) == tuple(sizes)

    @given(
        st.integers(1_000_000, 10**12),
        st.floats(0.01, 1.0),
        st.floats(1e6, 1e12),
        st.floats(1e-7, 1e-2),
    )
    def test_options_round_trip(self, memory, efficiency, network, latency):
        cluster = Cluster.parse(
            f"2x4:a100,memory={memory}B,efficiency={efficiency!r},"
            f"network={network!r}B/s,network_latency={latency!r}s"
        )
        assert cluster.memory_bytes == memory
        assert cluster.device.matmul_efficiency == efficiency
        assert cluster.levels[0].link.bandwidth_bytes_per_s == network
        assert cluster.levels[0].link.latency_s == latency
        assert Cluster.parse(str(cluster)) == cluster

    def test_power_slows_products_by_its_cube_root(self):
        whole = Cluster.parse("8:h100").device
        limited = Cluster.parse("8:h100,power=87.5W").device
        assert math.isclose(limited.kept_rate, whole.kept_rate / 2)
        assert Cluster.parse("8:h100,power=0.7kW").device == whole

    @pytest.mark.parametrize("watts", ["500W", "350W", "123.4W"])
    def test_power_round_trips(self, watts):
        cluster = Cluster.parse(f"8:h100,power={watts}")
        assert Cluster.parse(str(cluster)) == cluster

    def test_default_device_is_h100(self):
        assert Cluster.parse("8x8") == Cluster.parse("8x8:h100")

    def test_case_and_spaces_do_not_matter(self):
        assert Cluster.parse(" 8x8:H100, memory=40GB ") == Cluster.parse(
            "8x8:h100,memory=40GB"
        )

    def test_short_options_stay_short(self):
        text = "2x4:h100,memory=40GB,network=100Gb/s,network_latency=5us"
        assert str(Cluster.parse(text)) == text

    def test_levels_hold_the_datasheets_links(self):
        """900 GB/s of NVLink both ways; one 400 Gb/s port per GPU."""
        cluster = Cluster.parse("2x8x8:h100")
        pod, host, device = (
            level.link.bandwidth_bytes_per_s for level in cluster.levels
        )
        assert device == pytest.approx(900e9 / 2 * 0.836)
        assert host == pytest.approx(400e9 / 8 * NETWORK_EFFICIENCY)
        assert pod == host

    def test_one_level_is_one_fast_domain(self):
        one, two = Cluster.parse("8:h100"), Cluster.parse("2x8:h100")
        assert one.levels[0].link == two.levels[1].link

    def test_torus_dimension_without_wrap_around_has_half_the_bandwidth(self):
        whole, part = Cluster.parse("16x4:v5e").levels
        assert whole.link.bandwidth_bytes_per_s == 2 * part.link.bandwidth_bytes_per_s

    @pytest.mark.parametrize(
        ("name", "card_gib"),
        [
            ("a100", 80), ("a100-40", 40), ("h100", 80), ("h200", 144), ("v100", 32),
            ("t4", 16), ("b200", 180), ("gb200", 186), ("a10g", 24), ("l4", 24),
            ("l40s", 48), ("rtx4090", 24),
        ],
    )  # fmt: skip
    def test_memory_is_what_a_program_may_use(self, name, card_gib):
        """Cards are sold by GiB, of which the driver keeps up to a fifteenth."""
        usable = PRESETS[name].device.memory_bytes / USABLE_MEMORY
        assert 0.92 * card_gib * 2**30 <= usable <= card_gib * 2**30

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_rates_are_kept_in_files(self, name):
        cluster = Cluster.parse(f"2x8:{name}")
        again = Cluster.from_data(cluster.to_data())
        assert again == cluster
        assert again.device.rates == PRESETS[name].device.rates
        assert again.levels[-1].link.rates == cluster.levels[-1].link.rates

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"rates": "token ring"}, "rates must be one of"),
            ({"rates": "h100", "topology": "ring"}, "only a switch has rates"),
        ],
    )
    def test_links_with_rates_that_do_not_exist(self, values, said):
        with pytest.raises(ClusterError, match=said):
            LinkSpec(latency_s=1e-6, bandwidth_bytes_per_s=1e9, **values)

    @pytest.mark.parametrize(("name", "gib"), [("v5e", 16), ("v5p", 96)])
    def test_the_compiler_keeps_a_little_of_a_tpu(self, name, gib):
        memory_bytes = PRESETS[name].device.memory_bytes
        assert 0.98 * gib * 2**30 <= memory_bytes <= gib * 2**30

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "not a shape"),
            ("x8:h100", "not a shape"),
            ("0x8:h100", "not a shape"),
            ("-1x8", "not a shape"),
            ("8 x 8:h100", "not a shape"),
            ("h100", "not a shape"),
            ("2x2x2x2:h100", "at most 3"),
            ("8:", "no device after the colon"),
            ("8:h1000", "unknown device 'h1000'"),
            ("8:h100,", "unknown option ''"),
            ("8:h100,ram=4GB", "unknown option 'ram=4GB'"),
            ("8:h100,memory", "unknown option 'memory'"),
            ("8:h100,memory=40", "memory"),
            ("8:h100,memory=lots", "not a number of bytes"),
            ("8:h100,memory=1.2.3GB", "not a number of bytes"),
            ("8:h100,memory=.GB", "not a number of bytes"),
            ("8:h100,memory=0GB", "memory_bytes must be positive"),
            ("8:h100,efficiency=2", "matmul_efficiency must be above 0"),
            ("8:h100,power=0W", "draws up to 700 W"),
            ("8:h100,power=701W", "draws up to 700 W"),
            ("8:h100,power=500", "not a number of watts"),
            ("8:cpu,power=50W", "the power of a cpu is not known"),
            ("8:h100,network=1Gb/s", "links between hosts"),
            ("4x4:v5e,network=1Gb/s", "links between hosts"),
            ("2x8:h100,network=1GB", "not a number of bytes per second"),
            ("nowhere.toml", "cannot read"),
        ],
    )
    def test_bad_text(self, text, said):
        with pytest.raises(ClusterError) as caught:
            Cluster.parse(text)
        if said != "memory":
            assert said in str(caught.value)

    @pytest.mark.parametrize(
        "text", ["8 x 8", "8:h1000", "8:h100,ram=1GB", "2x8,network=1"]
    )
    def test_errors_show_what_is_right(self, text):
        with pytest.raises(ClusterError, match=r"Example|such as"):
            Cluster.parse(text)

    def test_cluster_error_is_a_value_error(self):
        assert issubclass(ClusterError, ValueError)


class TestQuantities:
    @pytest.mark.parametrize(
        ("text", "unit", "value"),
        [
            ("40GB", "bytes", 40e9),
            ("40GiB", "bytes", 40 * 2**30),
            ("1.5e3kB", "bytes", 1.5e6),
            ("7B", "bytes", 7),
            ("100Gb/s", "bytes per second", 12.5e9),
            ("100GB/s", "bytes per second", 100e9),
            ("10us", "seconds", 10e-6),
            ("0.5", "a part of 1", 0.5),
        ],
    )
    def test_units(self, text, unit, value):
        assert parse_quantity(text, unit) == pytest.approx(value, rel=1e-15)

    @pytest.mark.parametrize("network", ["80Gb/s", "8Gb/s", "100Gb/s", "20Mb/s"])
    def test_networks_are_written_in_bits(self, network):
        text = f"2x4:cpu,network={network}"
        assert str(Cluster.parse(text)) == text

    @given(positive, st.sampled_from(["bytes", "bytes per second", "seconds"]))
    def test_format_round_trip(self, value, unit):
        assert parse_quantity(format_quantity(value, unit), unit) == value


class TestMeshShapes:
    @given(shapes, st.integers(3, 4))
    def test_axes_lie_within_levels_and_fill_them(self, sizes, max_axes):
        cluster = Cluster.parse(f"{'x'.join(map(str, sizes))}:h100")
        meshes = cluster.mesh_shapes(max_axes)
        for mesh in meshes:
            filled = Counter(dict.fromkeys(range(len(sizes)), 1))
            for axis in mesh.axes:
                filled[axis.level] *= axis.size
                assert axis.link == cluster.levels[axis.level].link
                assert axis.size > 1 or cluster.num_devices == 1
            assert [filled[i] for i in range(len(sizes))] == sizes
            assert mesh.num_devices == cluster.num_devices
            assert [a.level for a in mesh.axes] == sorted(a.level for a in mesh.axes)
            assert len(set(mesh.names)) == len(mesh.axes) <= max_axes

    @given(shapes)
    def test_coarse_first_none_twice(self, sizes):
        cluster = Cluster.parse(f"{'x'.join(map(str, sizes))}:h100")
        meshes = cluster.mesh_shapes()
        lengths = [len(mesh.axes) for mesh in meshes]
        assert lengths == sorted(lengths)
        layouts = [tuple((a.level, a.size) for a in mesh.axes) for mesh in meshes]
        assert len(set(layouts)) == len(layouts)
        assert meshes[0] == cluster.default_mesh()

    @given(st.integers(1, 10), st.integers(1, 4))
    def test_count_is_that_of_compositions(self, power, max_axes):
        """2^p has C(p-1, k-1) ordered factorisations into k factors."""
        meshes = Cluster.parse(f"{2**power}:cpu").mesh_shapes(max_axes)
        assert len(meshes) == sum(math.comb(power - 1, k) for k in range(max_axes))

    def test_order_for_one_host(self):
        meshes = Cluster.parse("8:h100").mesh_shapes()
        assert [mesh.sizes for mesh in meshes] == [(8,), (4, 2), (2, 4), (2, 2, 2)]

    def test_default_names(self):
        names = [mesh.names for mesh in Cluster.parse("8:h100").mesh_shapes()]
        two = ("data", "tensor")
        assert names == [("data",), two, two, ("data", "fsdp", "tensor")]

    def test_own_names(self):
        cluster = Cluster.parse("2x4:h100")
        assert cluster.default_mesh(names=("a", "b")).names == ("a", "b")
        assert cluster.mesh_shapes(names=("a", "b", "c"))[0].names == ("a", "b")
        with pytest.raises(ClusterError, match="different"):
            cluster.mesh_shapes(names=("a", "a"))
        with pytest.raises(ClusterError, match="at least 2"):
            cluster.mesh_shapes(names=("a",))

    def test_single_device(self):
        (mesh,) = Cluster.parse("1x1:cpu").mesh_shapes()
        assert (mesh.names, mesh.sizes) == (("data",), (1,))

    def test_levels_of_size_one_make_no_axis(self):
        assert Cluster.parse("1x8:h100").default_mesh().sizes == (8,)

    def test_too_few_axes(self):
        with pytest.raises(ClusterError, match="Try max_axes=2"):
            Cluster.parse("2x8:h100").mesh_shapes(max_axes=1)

    def test_axis_by_name(self):
        mesh = Cluster.parse("2x8:h100").default_mesh()
        assert mesh.axis("tensor").size == 8
        assert str(mesh) == "data=2 tensor=8"
        with pytest.raises(ClusterError, match="no axis 'model'"):
            mesh.axis("model")


class TestSpecs:
    def test_dtypes_run_at_the_rate_of_what_they_are_widened_to(self):
        a100, h100 = PRESETS["a100"].device, PRESETS["h100"].device
        assert h100.peak("float8_e4m3fn") == h100.peak("float8")
        assert a100.peak("float8_e4m3fn") == a100.peak("bfloat16")
        assert a100.peak("uint8") == a100.peak("int8")
        assert PRESETS["v5e"].device.peak("float16") == 197e12
        assert a100.peak("int32") == a100.vector_peak

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_presets_are_plausible(self, name):
        """Half the width is never slower, and the ridge lies above one FLOP/byte."""
        device = PRESETS[name].device
        assert device.peak("float16") >= device.peak("float32") or name == "cpu"
        assert device.peak("float8_e5m2") >= device.peak("bfloat16")
        assert device.peak("float32") > device.memory_bandwidth_bytes_per_s
        assert device.vector_peak <= device.peak("float32")
        inner, outer = PRESETS[name].inner, PRESETS[name].outer
        assert inner.bandwidth_bytes_per_s >= outer.bandwidth_bytes_per_s

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"kind": "fpga"}, "kind must be one of"),
            ({"rates": "h1000"}, "rates must be one of"),
            ({"peak_flops_per_s": (("bfloat16", 1.0),)}, "float32 among them"),
            ({"peak_flops_per_s": (("float32", -1.0),)}, "must be positive"),
            ({"memory_bytes": 0}, "must be positive"),
            ({"memory_bandwidth_bytes_per_s": math.inf}, "finite"),
            ({"matmul_efficiency": 1.1}, "at most 1"),
            ({"kernel_latency_s": -1.0}, "zero or positive"),
        ],
    )
    def test_bad_devices(self, change, said):
        with pytest.raises(ClusterError, match=said):
            dataclasses.replace(PRESETS["h100"].device, **change)

    def test_bad_links_levels_and_clusters(self):
        link = LinkSpec(latency_s=0.0, bandwidth_bytes_per_s=1e9)
        fit = CollectiveFit(
            kind="all_gather", group_size=2, latency_s=0.0, s_per_byte=0.0
        )
        with pytest.raises(ClusterError, match="latency_s"):
            dataclasses.replace(link, latency_s=-1e-6)
        with pytest.raises(
            ClusterError, match="bandwidth_bytes_per_s must be positive"
        ):
            dataclasses.replace(link, bandwidth_bytes_per_s=0.0)
        with pytest.raises(ClusterError, match="topology"):
            dataclasses.replace(link, topology="star")
        with pytest.raises(ClusterError, match="measured once"):
            dataclasses.replace(link, measured=(fit, fit))
        with pytest.raises(ClusterError, match="kind must be"):
            dataclasses.replace(fit, kind="broadcast")
        with pytest.raises(ClusterError, match="2 or more"):
            dataclasses.replace(fit, group_size=1)
        with pytest.raises(ClusterError, match="1 or more"):
            Level(name="host", size=0, link=link)
        level = Level(name="host", size=2, link=link)
        with pytest.raises(ClusterError, match="different names"):
            Cluster(device=PRESETS["cpu"].device, levels=(level, level))
        with pytest.raises(ClusterError, match="at least one"):
            Cluster(device=PRESETS["cpu"].device, levels=())


def custom_cluster() -> Cluster:
    device = DeviceSpec(
        name='odd "name" \\ é',
        kind="gpu",
        peak_flops_per_s=(("float32", 1e13 / 3), ("float8", 3e14)),
        memory_bytes=12_345_678_901,
        memory_bandwidth_bytes_per_s=1e12 / 7,
        matmul_efficiency=1 / 3,
        kernel_latency_s=1.7e-6,
    )
    fits = tuple(
        CollectiveFit(
            kind=kind,
            group_size=k,
            latency_s=1e-6 * k / 3,
            s_per_byte=1e-10 / 3,
            large_s_per_byte=1e-10,
            relative_error=0.1,
        )
        for kind in ("all_reduce", "all_gather")
        for k in (2, 4)
    )
    network = LinkSpec(latency_s=1e-5, bandwidth_bytes_per_s=1e16 / 3)
    ring = LinkSpec(
        latency_s=1e-6, bandwidth_bytes_per_s=1e11, topology="ring", measured=fits
    )
    levels = (
        Level(name="host", size=3, link=network),
        Level(name="device", size=4, link=ring),
    )
    return Cluster(device=device, levels=levels)


class TestToml:
    @pytest.mark.parametrize("text", ["8x8:h100", "16x16:v5e", "2x4x4:cpu", "1:t4"])
    def test_round_trip_of_presets(self, text, tmp_path):
        path = tmp_path / "cluster.toml"
        cluster = Cluster.parse(text)
        path.write_text(cluster.to_toml(), encoding="utf-8")
        assert Cluster.from_toml(path) == cluster
        assert Cluster.parse(str(path)) == cluster

    def test_round_trip_of_everything(self, tmp_path):
        path = tmp_path / "cluster.toml"
        path.write_text(custom_cluster().to_toml(), encoding="utf-8")
        read = Cluster.from_toml(path)
        assert read == custom_cluster()
        assert read.levels[1].link.measured == custom_cluster().levels[1].link.measured
        assert read.fingerprint() == custom_cluster().fingerprint()

    def test_custom_cluster_says_that_it_is_custom(self):
        cluster = custom_cluster()
        assert str(cluster).startswith("3x4:odd")
        assert f"(custom {cluster.fingerprint()[:8]})" in str(cluster)

    def test_a_changed_preset_does_not_pass_for_the_preset(self):
        cluster = Cluster.parse("8:h100")
        device = dataclasses.replace(cluster.device, kernel_latency_s=1.0)
        assert "custom" in str(dataclasses.replace(cluster, device=device))

    def test_preset_with_changes(self, tmp_path):
        path = tmp_path / "cluster.toml"
        path.write_text(
            '[device]\npreset = "a100"\nmemory_bytes = 40e9\n'
            '[[level]]\nname = "host"\nsize = 8\nlatency_s = 0\n'
            "bandwidth_bytes_per_s = 1e9\n"
        )
        cluster = Cluster.from_toml(path)
        base = PRESETS["a100"].device
        assert cluster.device == dataclasses.replace(base, memory_bytes=40_000_000_000)
        assert cluster.num_devices == 8

    def test_the_example_in_the_documentation(self, tmp_path):
        text = (ROOT / "docs/cost-model.md").read_text(encoding="utf-8")
        blocks = text.split("```toml\n")[1:]
        assert blocks
        for block in blocks:
            path = tmp_path / "cluster.toml"
            path.write_text(block.split("```")[0], encoding="utf-8")
            assert Cluster.from_toml(path).num_devices > 1

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[device", "cluster.toml"),
            ("", "device"),
            ('[device]\nname = "x"\n', "level"),
            ('level = []\n[device]\nname = "x"\n', "lacks kind"),
            ('level = []\n[device]\npreset = "h100"\n', "at least one"),
            ('level = []\n[device]\npreset = "h1"\n', "unknown device 'h1'"),
            ('level = []\n[device]\npreset = "h100"\nmemory = 1\n', "unknown field"),
            ('level = []\n[device]\npreset = "h100"\nmemory_bytes = "1"\n', "int"),
        ],
    )
    def test_bad_files(self, text, said, tmp_path):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        with pytest.raises(ClusterError, match=said):
            Cluster.from_toml(path)


class TestFingerprint:
    def test_stable_across_processes(self):
        code = (
            "from autopar.cluster import Cluster;"
            "print(Cluster.parse('8:t4').fingerprint())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert done.stdout.strip() == Cluster.parse("8:t4").fingerprint()

    def test_sees_every_number(self):
        texts = ["8:h100", "16:h100", "2x4:h100", "8:h200", "8:h100,memory=1GB"]
        assert len({Cluster.parse(text).fingerprint() for text in texts}) == len(texts)


def test_describing_a_cluster_starts_no_backend():
    code = (
        "from autopar.cluster import Cluster; import autopar.cost.compute;"
        "import autopar.cost.collectives; Cluster.parse('8x8:h100').mesh_shapes();"
        "import jax;"
        "jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    # The number of devices can only be set before a backend starts.
    assert done.stdout.strip() == "3"
