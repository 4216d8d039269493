//! `gale check`: compatibility report for an nginx configuration.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use gale_check::Report;
use gale_config::{DiskFiles, Sources};
use gale_engine::configuration::tables;
use gale_modules::order::ORDER;

use crate::arguments::Check;

/// Prints the report. The exit status is 0 if Gale would accept the configuration, judging by its text alone.
pub fn print(check: &Check) -> ExitCode {
    let mut sources = Sources::new();
    let prefix = check.file.parent().unwrap_or(Path::new("/"));
    let parsed = match gale_config::parse(&mut sources, &mut DiskFiles, &check.file, prefix) {
        Ok(parsed) => parsed,
        Err(error) => {
            eprint!("{}", error.render(&sources, "gale"));
            return ExitCode::FAILURE;
        }
    };
    let report = gale_check::check(&parsed, &sources, &tables(&ORDER));
    match write(&report, check.prints_json) {
        // The reader may close the pipe early: `gale check | head`.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("gale: the report cannot be printed: {error}");
            ExitCode::FAILURE
        }
        _ if report.is_accepted() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn write(report: &Report, prints_json: bool) -> io::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    if prints_json {
        serde_json::to_writer_pretty(&mut out, report)?;
        writeln!(out)?;
    } else {
        write!(out, "{report}")?;
    }
    out.flush()
}
