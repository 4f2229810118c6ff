"""Reports of runs: one HTML file per run, generated from plain files that the trainer writes.

    ReportProcess(folder)                         writes it during the run, in a separate process
    write_versions(folder), write_eval(folder, ...), write_samples(folder, ...)     its other files
    write_report(folder)                          runs/NAME/report.html from these files
    python -m omni_rl.report runs/a runs/b     several runs in one page

The report is a function of the run folder only: `omni_rl.report.folder` lists its files.
"""

from omni_rl.report.folder import Sample as Sample
from omni_rl.report.folder import write_eval as write_eval
from omni_rl.report.folder import write_now as write_now
from omni_rl.report.folder import write_samples as write_samples
from omni_rl.report.folder import write_versions as write_versions
from omni_rl.report.page import write_comparison as write_comparison
from omni_rl.report.page import write_report as write_report
