//! report: results of a measurement as Markdown and JSON, with a description of the machine.
//!
//! Reports contain no paths of the machine: a server is identified by label and version.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde::Serialize;
use serde_json::{Value, json};

use crate::servers::Program;

#[derive(Debug)]
pub struct Document {
    name: &'static str,
    markdown: String,
    data: Value,
    /// SVG charts, stored beside the other files: file name and contents.
    charts: Vec<(String, String)>,
}

impl Document {
    /// `name` is the file name, `body` is the Markdown below the header, and `data` has the same figures.
    pub fn new(
        name: &'static str,
        title: &str,
        programs: &[Program],
        body: &str,
        data: impl Serialize,
    ) -> Result<Document, String> {
        let machine = Machine::read();
        let mut markdown = format!(
            "# {title}\n\n{} · {} · {} cores · Linux {}{}\n\n",
            machine.when,
            machine.cpu,
            machine.cores,
            machine.kernel,
            if machine.pages_out { " · pages out what seems idle (DAMON)" } else { "" }
        );
        for program in programs {
            let _ = writeln!(markdown, "- {}: {}", program.label, program.version);
        }
        let servers: Vec<Value> = programs.iter().map(|p| json!({ "label": p.label, "version": p.version })).collect();
        let data = json!({ "measurement": name, "machine": machine, "servers": servers, "data": data });
        markdown.push('\n');
        markdown.push_str(body);
        Ok(Document { name, markdown, data, charts: Vec::new() })
    }

    /// Adds SVG charts, each with its file name.
    pub fn with_charts(self, charts: Vec<(String, String)>) -> Document {
        Document { charts, ..self }
    }

    /// Prints the Markdown and writes all files to `directory`.
    pub fn publish(&self, directory: &Path) -> Result<(), String> {
        println!("{}", self.markdown);
        self.save(directory)
    }

    /// Writes all forms into `directory`.
    pub fn save(&self, directory: &Path) -> Result<(), String> {
        let fault = |error: std::io::Error| format!("{}: {error}", directory.display());
        fs::create_dir_all(directory).map_err(fault)?;
        fs::write(directory.join(format!("{}.md", self.name)), &self.markdown).map_err(fault)?;
        for (name, svg) in &self.charts {
            fs::write(directory.join(name), svg).map_err(fault)?;
        }
        let json = serde_json::to_string_pretty(&self.data).map_err(|error| error.to_string())?;
        fs::write(directory.join(format!("{}.json", self.name)), json + "\n").map_err(fault)
    }
}

#[derive(Debug, Serialize)]
struct Machine {
    when: String,
    cpu: String,
    cores: usize,
    kernel: String,
    /// The kernel pages out memory that seems unused, even without memory pressure, so data that a measurement expects
    /// in memory may be missing. (DAMON, `pageout`)
    pages_out: bool,
}

impl Machine {
    fn read() -> Machine {
        let date = Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"]).output();
        let when = date.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let cpu = model.and_then(|line| line.split_once(':')).map_or("unknown CPU", |(_, name)| name.trim());
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Machine {
            when,
            cpu: cpu.to_owned(),
            cores: std::thread::available_parallelism().map_or(0, |count| count.get()),
            kernel: kernel.trim().to_owned(),
            pages_out: pages_out(Path::new("/sys/kernel/mm/damon/admin/kdamonds")),
        }
    }
}

/// Returns true if a DAMON thread runs with a `pageout` scheme. They are described in a tree of directories.
fn pages_out(directory: &Path) -> bool {
    let text = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let below = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    below(directory).filter(|kdamond| text(&kdamond.join("state")).trim() == "on").any(|kdamond| {
        let contexts = below(&kdamond.join("contexts"));
        let mut schemes = contexts.flat_map(|context| below(&context.join("schemes")));
        schemes.any(|scheme| text(&scheme.join("action")).trim() == "pageout")
    })
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub greatest: f64,
}

impl std::fmt::Display for Spread {
    /// `median (minimum – maximum)` with two decimals.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2} – {:.2})", self.median, self.least, self.greatest)
    }
}

impl Spread {
    /// Computes the spread; all zero without samples.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Spread {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (Some(&least), Some(&greatest)) = (sorted.first(), sorted.last()) else {
            return Spread::default();
        };
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Spread { median, least, greatest }
    }
}

/// Returns a Markdown table. Every row has as many cells as `header`.
fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = format!("| {} |\n|{}\n", header.join(" | "), "---|".repeat(header.len()));
    for row in rows {
        debug_assert_eq!(row.len(), header.len());
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text
}

/// A column of a table of items: its name, and the function that formats a cell.
pub type Column<'a, T> = (&'a str, &'a dyn Fn(&T) -> String);

/// Returns a Markdown table with a row for each of `items`.
pub fn table_of<'a, T: 'a>(items: impl IntoIterator<Item = &'a T>, columns: &[Column<T>]) -> String {
    let header: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    let cells = |item| columns.iter().map(|(_, cell)| cell(item)).collect();
    table(&header, &items.into_iter().map(cells).collect::<Vec<Vec<String>>>())
}

/// Formats a share as percentage; 1.0 is 100 %.
pub fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_row_for_each() {
        let text = table_of(&[1, 2], &[("number", &|n: &i32| n.to_string()), ("square", &|n| (n * n).to_string())]);
        assert_eq!(text, "| number | square |\n|---|---|\n| 1 | 1 |\n| 2 | 4 |\n");
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]).median, 2.0);
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]), Spread { median: 2.5, least: 1.0, greatest: 4.0 });
        assert_eq!(Spread::of([]), Spread::default());
    }
}
