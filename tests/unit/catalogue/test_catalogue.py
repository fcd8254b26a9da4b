"""The catalogue: every number says where it comes from, and names are looked up kindly."""

import subprocess
import sys

import pytest

from penstock.base.errors import FileError, InputError
from penstock.core import catalogue
from penstock.core.catalogue import Curve, Figure


def every_figure():
    for entry in catalogue.devices().values():
        yield from (figure for _, figure in entry.figures())
        for name in entry.efficiency.__struct_fields__:
            value = getattr(entry.efficiency, name)
            if isinstance(value, Figure):
                yield value
    for host in catalogue.hosts().values():
        yield host.card.bytes_per_second
        if host.link is not None:
            yield host.link.bytes_per_second


def test_every_number_names_a_source_that_is_listed():
    figures = list(every_figure())
    assert len(figures) > 300
    assert {figure.source for figure in figures} <= set(catalogue.sources())


def test_what_decides_about_the_usual_devices_is_sourced():
    for name in ("a100-sxm", "h100-sxm", "h200", "b200"):
        entry = catalogue.device_named(name)
        unsourced = {name for name, own in entry.figures() if own.source == catalogue.UNSOURCED}
        assert unsourced <= {"allocator's slack"}


def test_every_host_has_devices_of_the_catalogue_and_every_usual_host_is_there():
    for host in catalogue.hosts().values():
        assert host.device in catalogue.devices()
    for entry in catalogue.devices().values():
        assert not entry.host or entry.host in catalogue.hosts()


@pytest.mark.parametrize("name", ["h100-sxm", "H100-SXM", "h100", " H100_SXM "])
def test_a_device_is_found_in_any_case_and_by_its_aliases(name):
    assert catalogue.device_named(name).name == "h100-sxm"


def test_an_unknown_device_is_refused_with_the_nearest_ones():
    with pytest.raises(InputError, match=r"no device 'h100-nvl'.*h100-pcie.*measure-device"):
        catalogue.device_named("h100-nvl")


def test_the_peak_of_a_missing_dtype_is_that_of_a_wider_one():
    assert catalogue.device_named("v100").peak("bf16").value == 125e12
    assert catalogue.device_named("a100").peak("fp8").value == 312e12


def test_a_device_as_a_file_is_read_back_as_it_was(tmp_path):
    entry = catalogue.device_named("h100-sxm")
    path = tmp_path / "mine.toml"
    path.write_text(catalogue.as_toml(entry))
    again = catalogue.device_named(str(path))
    assert again == entry


def test_a_file_that_is_no_catalogue_is_refused_by_its_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[devices.mine]\ntitle = 3\n")
    with pytest.raises(FileError, match=r"mine\.toml is no catalogue"):
        catalogue.device_named(str(path))


def test_a_curve_changes_evenly_with_the_logarithm_and_stays_outside():
    curve = Curve(points=((1.0, 0.2), (100.0, 0.6)))
    assert curve.at(0.1) == 0.2
    assert curve.at(10) == pytest.approx(0.4)
    assert curve.at(1e6) == 0.6
    with pytest.raises(InputError, match="ascending"):
        Curve(points=((2.0, 0.2), (1.0, 0.6)))


def test_the_catalogue_is_read_without_torch():
    code = (
        "import sys, penstock as pk; pk.Cluster.of('h100-sxm', hosts=2);"
        "import penstock.core.pricing; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(("device", "dtype"), [("gb300", "fp32"), ("h100", "fp64")])
def test_a_narrower_dtype_does_not_stand_in_for_a_wider_one(device, dtype):
    entry = catalogue.device_named(device)
    assert not entry.has_peak(dtype)
    with pytest.raises(InputError, match=rf"{entry.name} multiplies {dtype}; it has .*bf16.*file"):
        entry.peak(dtype)


def test_a_host_in_place_of_a_device_is_refused_with_its_device():
    with pytest.raises(InputError, match="dgx-h100 is a host; its devices are h100-sxm"):
        catalogue.device_named("DGX_H100")
