"""Keeps, of a requirements file on stdin, what CPython 3.11 on x86-64 Linux without an accelerator needs."""

import re
import sys

ENVIRONMENT = {
    "python_full_version": "3.11.7",
    "python_version": "3.11",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
    "extra": "",
}
ACCELERATOR = re.compile(r"^(nvidia-|cuda-|triton\b)")


def main() -> None:
    from packaging.requirements import Requirement

    for line in sys.stdin:
        requirement = Requirement(line.strip())
        if ACCELERATOR.match(requirement.name):
            continue
        if requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT):
            version = str(requirement.specifier).partition("+")[0]  # +cpu: the build is the machine's own affair
            print(f"{requirement.name}{version}")


if __name__ == "__main__":
    main()
