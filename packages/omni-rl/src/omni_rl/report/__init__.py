"""Reports of runs: one HTML file a run, drawn from plain files that the trainer writes.

    ReportProcess(folder)                         draws it while the run goes on, in a process of its own
    write_versions(folder), write_eval(folder, ...), write_samples(folder, ...)     the files that it is drawn from
    write_report(folder)                          runs/NAME/report.html, of the files that are there
    python -m omni_rl.report runs/a runs/b     several runs in one page

The report is a function of the run folder alone: `omni_rl.report.folder` lists its files.
"""

from omni_rl.report.folder import Sample as Sample
from omni_rl.report.folder import write_eval as write_eval
from omni_rl.report.folder import write_samples as write_samples
from omni_rl.report.folder import write_versions as write_versions
from omni_rl.report.page import write_comparison as write_comparison
from omni_rl.report.page import write_report as write_report
