"""What a report says of what the server could see."""

import pytest

import fedveil as fv
from fedveil import report
from fedveil.core.ledger import Ledger
from fedveil.privacy import SecureSum
from fedveil.privacy.secagg.records import Unmask
from fedveil.report.figures import size
from fedveil.runs.folder import RunFolder
from privacy.secagg.sums import Only, Summed, Transport
from toys import linear_task

TASK = linear_task(10, 60, uneven=True)


def told(tmp_path, how: SecureSum, engine: Transport, method: fv.Method | None = None) -> str:
    """The paragraph of a run of two rounds."""
    folder = RunFolder(tmp_path / "run")
    folder.describe('rounds = 2\n[task]\ndata = "digits"\n[method]\nname = "toy"\n', {})
    fv.run(TASK, method or Summed(how), rounds=2, cohort=Only(size=6), engine=engine, folder=folder)
    page = report.write([tmp_path / "run"], tmp_path / "report.html").read_text()
    return page.partition("What the server saw")[2].partition("<h2>")[0]


def test_a_report_says_what_the_server_saw_and_what_not(tmp_path):
    said = told(tmp_path, SecureSum(), Transport())
    assert "toy: in 2 of 2 rounds the server saw a secure sum only." in said
    assert "the sum of the vectors of 6 or more clients" in said
    assert "not see the vector or the record count of any client (proved, if it keeps to the protocol)." in said
    added = Ledger.read(tmp_path / "run" / "ledger.jsonl").summary("")
    assert f"The protocol added {size(added['protocol_up'])} up and {size(added['protocol_down'])} down." in said
    assert "stopped" not in said
    assert "other round" not in said


def test_it_says_against_whom(tmp_path):
    assert "(proved, also if it lies)" in told(tmp_path, SecureSum(server="malicious"), Transport())


@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_it_says_that_a_sum_which_stopped_gave_nothing_away(tmp_path):
    said = told(tmp_path, SecureSum(), Transport({Unmask: range(10)}))
    assert "in 0 of 2 rounds" in said
    assert "2 sums stopped early and gave nothing away." in said
    assert "proved" not in said


def test_it_says_nothing_of_runs_without(tmp_path):
    assert told(tmp_path, SecureSum(), Transport(), fv.FedAvg()) == ""
