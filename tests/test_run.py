"""`./run` on machines unlike this one: a stand-in interpreter records what set-up asks for and installs nothing."""

import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).resolve().parent.parent

# Answers `-m venv DIR`, `-m pip …` and `-c "import jax, torch"`, and leaves the rest to the real interpreter. What it
# was asked goes to $LOG; pip takes $PIP_SECONDS or exits with $PIP_STATUS; a file beside the interpreter says it ran.
_PYTHON = f"""#!/bin/bash
echo "$(pwd) $*" >>"$LOG"
case "$*" in
    *"print(getattr"*) [ "${{AGE:-0}}" = 0 ] && echo "$0"; exit "${{AGE:-0}}" ;;
    *"-m venv "*) mkdir -p "${{!#}}/bin" && cp "$0" "${{!#}}/bin/python" ;;
    *"-m pip "*) touch "${{0%/*}}/half"; [ -z "$PIP_SECONDS" ] || exec sleep $PIP_SECONDS; exit "${{PIP_STATUS:-0}}" ;;
    *"import jax"* | *"-m pytest"* | *"-m bench"*) ;;
    *) exec "{sys.executable}" "$@" ;;
esac
"""

_SMI = """#!/bin/bash
echo "| NVIDIA-SMI {driver}    Driver Version: {driver}    CUDA Version: {cuda} |"
exit {status}
"""


def _write_executable(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class RunTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.root = self.folder / "a clone [with] spaces"
        self.bin = self.folder / "bin"
        self.log = self.folder / "log"
        self.root.mkdir()
        self.bin.mkdir()
        for name in ("run", "pyproject.toml"):
            shutil.copy(_ROOT / name, self.root / name)
        # A PATH with what the script needs besides bash and nothing else, so that no Python of this machine is found.
        for name in ("bash", "dirname", "readlink", "rm", "mkdir", "mv", "sleep", "cp", "touch", "timeout", "env"):
            if found := shutil.which(name):
                (self.bin / name).symlink_to(found)
        self.env = {"PATH": str(self.bin), "HOME": str(self.folder), "LOG": str(self.log)}

    def add_python(self, name: str = "python3.12") -> None:
        _write_executable(self.bin / name, _PYTHON)

    def add_nvidia_smi(self, driver: str, cuda: str, status: int = 0) -> None:
        _write_executable(self.bin / "nvidia-smi", _SMI.format(driver=driver, cuda=cuda, status=status))

    def start(self, *args: str, cwd: pathlib.Path | None = None, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [str(self.root / "run"), *args],
            cwd=cwd or self.folder,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def call(self, *args: str, **kwargs) -> tuple[int, str]:
        process = self.start(*args, **kwargs)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def asked(self, what: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if what in line]

    def wait_for(self, condition) -> None:
        end = time.monotonic() + 30
        while not condition():
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.02)

    def test_without_a_command_it_prints_its_usage(self):
        for args in ((), ("help",), ("--help",)):
            status, output = self.call(*args)
            self.assertEqual(status, 0)
            self.assertStartsWith(output, "usage: ./run <command>")

    def test_unknown_command_is_one_line(self):
        status, output = self.call("tset")
        self.assertEqual(status, 2)
        self.assertLen(output.splitlines(), 1)
        self.assertIn("'tset'", output)

    def test_without_a_python_it_says_what_to_install(self):
        status, output = self.call("test")
        self.assertEqual(status, 1)
        self.assertIn("no Python >= 3.12 found", output)
        self.assertIn("apt install python3.12", output)
        self.assertFalse((self.root / ".venv").exists())

    @parameterized.named_parameters(("too_old", "3", "older than 3.12"), ("without_venv", "1", "python3-venv"))
    def test_unfit_python_is_named_with_the_reason(self, age, reason):
        self.add_python("python3")
        status, output = self.call("test", AGE=age)
        self.assertEqual(status, 1)
        self.assertIn(str(self.bin / "python3"), output)
        self.assertIn(reason, output)

    def test_shim_that_does_not_run_is_passed_over(self):
        _write_executable(
            self.bin / "python3.13", "#!/bin/bash\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n"
        )
        self.add_python("python3")
        status, output = self.call("setup")
        self.assertEqual(status, 0, output)
        self.assertIn(f"making .venv with {self.bin}/python3\n", output)

    def test_pyenv_version_is_found_without_pyenv_on_the_path(self):
        version = self.folder / ".pyenv" / "versions" / "3.12.7" / "bin"
        version.mkdir(parents=True)
        _write_executable(version / "python3", _PYTHON)
        status, output = self.call("setup")
        self.assertEqual(status, 0, output)
        self.assertIn(str(version), output)

    def test_named_python_that_does_not_work_is_an_error(self):
        self.add_python()
        status, output = self.call("setup", DORMOUSE_PYTHON="/nonexistent/python")
        self.assertEqual(status, 1)
        self.assertIn("DORMOUSE_PYTHON=/nonexistent/python", output)

    def test_second_call_skips_set_up(self):
        self.add_python()
        self.assertEqual(self.call("test", "-k", "x")[0], 0)
        self.assertLen(self.asked("-m pip install"), 1)
        started = len(self.asked(""))
        status, output = self.call("test", "-k", "a b")
        self.assertEqual((status, output), (0, ""))
        self.assertLen(self.asked("-m pip install"), 1)
        # One interpreter to see that the environment works, one for the compile gate's tools, one to do what was asked.
        self.assertLen(self.asked("")[started:], 3)
        self.assertIn(f"{self.root} -m pytest", self.asked("-m pytest")[-1])
        self.assertEndsWith(self.asked("-m pytest")[-1], " -k a b")

    def test_tests_run_in_parallel_unless_there_is_a_gpu(self):
        self.add_python()
        self.call("test")
        self.add_nvidia_smi("580.95.05", "13.0")
        self.call("test")
        without, with_gpu = self.asked("-m pytest")
        self.assertIn(" -n auto ", without)
        self.assertNotIn(" -n ", with_gpu)

    def test_tools_of_the_compile_gate_are_for_machines_without_a_gpu(self):
        self.add_python()
        self.call("test")
        self.assertLen(self.asked("-m bench.compile_gate --install"), 1)
        self.add_nvidia_smi("580.95.05", "13.0")
        self.call("test")
        self.assertLen(self.asked("-m bench.compile_gate --install"), 1)

    def test_gate_and_measured_pass_their_arguments_on(self):
        self.add_python()
        self.assertEqual(self.call("gate", "--card=h200")[0], 0)
        self.assertEqual(self.asked("-m bench"), [f"{self.root} -m bench.compile_gate --card=h200"])
        self.assertEqual(self.call("measured", "-k", "x")[0], 0)
        self.assertEndsWith(self.asked("-m pytest")[-1], " -k x")

    def test_bench_runs_in_the_folder_of_the_caller(self):
        self.add_python()
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        self.assertEqual(self.call("bench", "--preset=few", cwd=elsewhere)[0], 0)
        self.assertEqual(self.asked("-m bench"), [f"{elsewhere} -m bench.kda --impl=pallas,torch --preset=few"])

    def test_it_can_be_called_through_a_link(self):
        self.add_python()
        link = self.folder / "link"
        link.symlink_to(self.root / "run")
        self.assertEqual(subprocess.run([link, "setup"], env=self.env, capture_output=True).returncode, 0)
        self.assertTrue((self.root / ".venv").exists())

    @parameterized.named_parameters(
        ("no_driver", None, "torch"),
        ("cuda_13", ("580.95.05", "13.0", 0), "cuda13"),
        ("later_cuda", ("700.10", "14.1", 0), "cuda13"),
        ("cuda_12", ("550.54.14", "12.4", 0), "cuda12"),
        ("cuda_unnamed", ("590.44", "N/A", 0), "cuda13"),
        ("cuda_11", ("470.57.02", "11.4", 0), "torch"),
        ("driver_not_loaded", ("580.95.05", "13.0", 9), "torch"),
    )
    def test_extra_follows_the_driver(self, smi, extra):
        self.add_python()
        if smi:
            self.add_nvidia_smi(*smi)
        status, output = self.call("setup")
        self.assertEqual(status, 0, output)
        self.assertEndsWith(self.asked("-m pip install")[0], f" -e .[{extra},plot,train,dev]")

    def test_driver_that_appears_later_gets_its_extra_and_a_lost_one_keeps_it(self):
        self.add_python()
        self.call("setup")
        self.add_nvidia_smi("580.95.05", "13.0")
        self.call("setup")
        (self.bin / "nvidia-smi").unlink()
        self.call("setup")
        self.assertLen(self.asked("-m pip install"), 2)
        self.assertIn("cuda13", self.asked("-m pip install")[1])
        self.assertLen(self.asked("-m venv"), 1)

    def test_extra_by_name_lasts(self):
        self.add_python()
        self.call("setup", DORMOUSE_EXTRA="cuda13,peers")
        self.call("setup")
        self.assertLen(self.asked("-m pip install"), 1)
        self.assertIn(".[cuda13,peers,plot,train,dev]", self.asked("-m pip install")[0])

    def test_changed_pyproject_installs_again_into_the_same_environment(self):
        self.add_python()
        self.call("setup")
        with (self.root / "pyproject.toml").open("a") as file:
            file.write("# changed\n")
        self.call("setup")
        self.assertLen(self.asked("-m pip install"), 2)
        self.assertLen(self.asked("-m venv"), 1)

    def test_failed_install_is_reported_and_tried_again(self):
        self.add_python()
        status, output = self.call("test", PIP_STATUS="1")
        self.assertEqual(status, 1)
        self.assertIn("pip could not install", output)
        self.assertEmpty(self.asked("-m pytest"))
        self.assertEqual(self.call("test")[0], 0)
        self.assertLen(self.asked("-m pip install"), 2)

    @parameterized.named_parameters(
        ("killed", signal.SIGKILL, -signal.SIGKILL), ("terminated", signal.SIGTERM, 130), ("ctrl_c", signal.SIGINT, 130)
    )
    def test_interrupted_set_up_is_built_anew(self, number, status):
        self.add_python()
        process = self.start("test", PIP_SECONDS="60")
        self.wait_for(lambda: (self.root / ".venv/bin/half").exists())
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output, _ = process.communicate(timeout=30)
        self.assertEqual(process.returncode, status, output)
        status, output = self.call("test")
        self.assertEqual(status, 0, output)
        self.assertIn("building it anew", output)
        self.assertLen(self.asked("-m venv"), 2)

    def test_environment_that_no_longer_runs_is_built_anew(self):
        self.add_python()
        self.call("setup")
        (self.root / ".venv/bin/python").unlink()
        self.assertEqual(self.call("setup")[0], 0)
        self.assertLen(self.asked("-m venv"), 2)

    def test_environment_made_by_someone_else_is_left_alone(self):
        self.add_python()
        (self.root / ".venv").mkdir()
        (self.root / ".venv/precious").touch()
        status, output = self.call("setup")
        self.assertEqual(status, 1)
        self.assertIn("was not made by this script", output)
        self.assertTrue((self.root / ".venv/precious").exists())

    def test_two_set_ups_at_once_install_once(self):
        self.add_python()
        first = self.start("test", PIP_SECONDS="1")
        self.wait_for(lambda: (self.root / ".venv/bin/half").exists())
        second = self.start("test")
        outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
        self.assertEqual((first.returncode, second.returncode), (0, 0), outputs)
        self.assertIn("another set-up is at work", outputs[1])
        self.assertLen(self.asked("-m pip install"), 1)


if __name__ == "__main__":
    absltest.main()
