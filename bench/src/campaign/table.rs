//! table: rows as Markdown and JSON. Rows of experiments that have not run this time stay as they were.

use std::path::Path;

use super::EXPERIMENTS;
use super::outcome::{Outcome, Row};
use crate::report::{self, Document};
use crate::servers::Program;

/// The table of these rows and the earlier ones in `results`.
pub fn document(rows: &[Row], programs: &[Program], results: &Path) -> Result<Document, String> {
    let rows = merged(earlier(results), rows);
    Document::new("campaign", "Attacks and faults", programs, &body(&rows), &rows)
}

/// The rows of an earlier run.
fn earlier(results: &Path) -> Vec<Row> {
    let text = std::fs::read_to_string(results.join("campaign.json")).unwrap_or_default();
    let document: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    serde_json::from_value(document["data"].clone()).unwrap_or_default()
}

/// The new rows and those old ones that they do not replace, in the order of the experiments.
fn merged(old: Vec<Row>, new: &[Row]) -> Vec<Row> {
    let is_same = |a: &Row, b: &Row| a.experiment == b.experiment && a.server == b.server;
    let kept = old.into_iter().filter(|old| !new.iter().any(|new| is_same(old, new)));
    let mut rows: Vec<Row> = kept.chain(new.iter().cloned()).collect();
    let place = |row: &Row| EXPERIMENTS.iter().position(|experiment| experiment.name == row.experiment);
    rows.retain(|row| place(row).is_some());
    rows.sort_by_key(|row| (place(row), !row.server.starts_with("gale"), row.server.clone()));
    rows
}

fn body(rows: &[Row]) -> String {
    let figure = |row: &Row, figure: &dyn Fn(&Outcome) -> String| row.outcome.as_ref().map_or(String::new(), figure);
    let table = report::table_of(
        rows,
        &[
            ("experiment", &|row: &Row| row.experiment.clone()),
            ("server", &|row| row.server.clone()),
            ("requests", &|row| figure(row, &|o| o.requests.to_string())),
            ("ended by the fault", &|row| figure(row, &|o| o.ended_by_fault.to_string())),
            ("lost", &|row| figure(row, &|o| o.lost.to_string())),
            ("wrong", &|row| figure(row, &|o| o.wrong.to_string())),
            ("descriptors left", &|row| figure(row, &|o| o.descriptors_left.to_string())),
            ("MiB before", &|row| figure(row, &|o| format!("{:.1}", o.before_mib))),
            ("after", &|row| figure(row, &|o| format!("{:.1}", o.after_mib))),
            ("longest ms", &|row| figure(row, &|o| format!("{:.0}", o.longest_ms))),
            ("verdict", &|row| cell(&row.verdict.to_string())),
        ],
    );
    let experiments: String = EXPERIMENTS
        .iter()
        .map(|experiment| format!("- `{}`: {} *{}*\n", experiment.name, experiment.does, experiment.holds))
        .collect();
    let noted = rows.iter().filter_map(|row| Some((row, row.outcome.as_ref()?)));
    let notes: String = noted
        .flat_map(|(row, outcome)| outcome.notes.iter().map(move |note| (row, note)))
        .map(|(row, note)| format!("- `{}`, {}: {note}\n", row.experiment, row.server))
        .collect();
    format!(
        "For every experiment must hold: no request is lost, no byte is wrong, no descriptor is left, the server works \
         afterwards, and memory comes back. *Ended by the fault* are requests that the fault itself ends, as it may: \
         with an error of the server or of the connection. The experiments follow below the table, each with its own \
         promise in italics.\n\n\
         {table}\n## Experiments\n\n{experiments}\n## Notes\n\n{notes}"
    )
}

/// Text for one cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::super::outcome::Verdict;
    use super::*;

    #[test]
    fn a_new_row_replaces_the_old_one_and_others_stay() {
        let row = |experiment: &str, server: &str, verdict| Row {
            experiment: experiment.to_owned(),
            server: server.to_owned(),
            is_gale: server.starts_with("gale"),
            outcome: None,
            verdict,
        };
        let fails = || Verdict::Fails(vec!["x".to_owned()]);
        let old = vec![
            row("dns", "nginx", Verdict::Holds),
            row("disk-full", "gale epoll", fails()),
            row("gone", "nginx", fails()),
        ];
        let rows = merged(old, &[row("disk-full", "gale epoll", Verdict::Holds)]);
        let told: Vec<_> = rows.iter().map(|row| (row.experiment.as_str(), row.verdict.clone())).collect();
        assert_eq!(told, [("disk-full", Verdict::Holds), ("dns", Verdict::Holds)]);
        assert!(body(&rows).contains("| dns | nginx |"));
    }
}
