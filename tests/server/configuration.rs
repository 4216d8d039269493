//! Invalid configurations, and the complete output of `-t` for each: `golden/*.golden`.
//!
//! A case begins with `======== NAME`, followed by the text of `gale.conf`, any number of further files, each after
//! `-------- file NAME`, and the program's output after `-------- output`. `%DIR%` stands for the directory of the
//! files. After an intended change, `GALE_GOLDEN=write cargo test -p gale --test server configuration:: -- --nocapture`
//! writes the present output, and shows the differences.
//!
//! Lines that a message may quote name files without `%DIR%`: the carets would depend on the length of the directory's
//! name.

use std::path::{Path, PathBuf};

use crate::support::{self, Directory, is_root, skip};

#[test]
fn syntax_errors_are_told_with_place_and_hint() {
    check("syntax.golden");
}

#[test]
fn errors_of_the_main_context_are_told_with_place_and_hint() {
    check("main.golden");
}

#[test]
fn errors_of_the_http_block_are_told_with_place_and_hint() {
    check("http.golden");
}

#[test]
fn errors_of_groups_of_servers_are_told_with_place_and_hint() {
    check("upstream.golden");
}

#[test]
fn errors_that_only_root_can_make_are_told_with_place_and_hint() {
    if !is_root() {
        return skip("only root can make these errors");
    }
    check("root.golden");
}

/// One invalid configuration.
struct Case {
    name: String,
    files: Vec<(String, String)>,
    output: String,
}

/// Runs every case of a file; with `GALE_GOLDEN=write` the file is rewritten instead of compared.
#[track_caller]
fn check(file: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(file);
    let golden = std::fs::read_to_string(&path).expect("a golden file");
    let (head, cases) = parse(&golden);
    let mut found = head;
    for case in &cases {
        found.push_str(&render(case, &run(case)));
    }
    let wrong = found.lines().filter(|line| line.starts_with("NOT REFUSED")).count();
    let difference = difference(&golden, &found);
    if difference.is_empty() {
        assert_eq!(wrong, 0, "{file} has cases that are not refused");
        return;
    }
    if std::env::var_os("GALE_GOLDEN").is_some_and(|value| value == "write") {
        println!("{file} is rewritten:\n{difference}");
        write(&path, &found);
        return;
    }
    panic!("{file} differs (- expected, + found; GALE_GOLDEN=write rewrites it):\n{difference}");
}

fn write(path: &PathBuf, text: &str) {
    std::fs::write(path, text).expect("the golden file can be written");
}

const CASE: &str = "======== ";
const FILE: &str = "-------- file ";
const OUTPUT: &str = "-------- output\n";

/// Text before the first case, and the cases.
fn parse(golden: &str) -> (String, Vec<Case>) {
    let mut pieces = split_at_lines(golden, CASE).into_iter();
    let head = pieces.next().expect("there is always a first piece").to_owned();
    let cases = pieces.map(|piece| {
        let (name, rest) = piece[CASE.len()..].split_once('\n').expect("a name");
        let (input, output) = rest.split_once(OUTPUT).unwrap_or_else(|| panic!("{name} has no output"));
        let mut texts = split_at_lines(input, FILE).into_iter();
        let mut files = vec![("gale.conf".to_owned(), texts.next().expect("the first piece").to_owned())];
        files.extend(texts.map(|text| {
            let (name, contents) = text[FILE.len()..].split_once('\n').expect("a name");
            (name.to_owned(), contents.to_owned())
        }));
        Case { name: name.to_owned(), files, output: output.to_owned() }
    });
    (head, cases.collect())
}

/// Splits a text before each line that begins with `start`.
fn split_at_lines<'t>(text: &'t str, start: &str) -> Vec<&'t str> {
    let mut places: Vec<usize> = text.match_indices(start).map(|(at, _)| at).collect();
    places.retain(|&at| at == 0 || text.as_bytes()[at - 1] == b'\n');
    let begins = std::iter::once(0).chain(places.iter().copied());
    let ends = places.iter().copied().chain(std::iter::once(text.len()));
    begins.zip(ends).map(|(begin, end)| &text[begin..end]).collect()
}

fn render(case: &Case, output: &str) -> String {
    let mut text = format!("{CASE}{}\n", case.name);
    for (index, (name, contents)) in case.files.iter().enumerate() {
        if index > 0 {
            text.push_str(&format!("{FILE}{name}\n"));
        }
        text.push_str(contents);
    }
    text + OUTPUT + output
}

/// Output of `-t` for the case, without varying parts. The command must fail and only print to standard error.
fn run(case: &Case) -> String {
    let directory = Directory::new();
    for (name, contents) in &case.files {
        directory.write(name, directory.replaced(contents));
    }
    let path = directory.path().to_str().expect("text");
    let mut command = support::binary(false);
    command.args(["-t", "-e", "stderr", "-p", path, "-c", "gale.conf"]).current_dir(path);
    let output = command.output().expect("the binary starts");
    let text = String::from_utf8(output.stderr).expect("messages are text").replace(path, "%DIR%");
    assert!(output.stdout.is_empty(), "{}: standard output is for what was asked for", case.name);
    // Recorded in the golden file, where every other result than a failure is unexpected.
    let is_refused = output.status.code() == Some(1);
    if is_refused { text } else { format!("{text}NOT REFUSED: {}\n", output.status) }
}

/// The lines that differ, with their cases. Enough for similar texts.
fn difference(expected: &str, found: &str) -> String {
    let (_, expected) = parse(expected);
    let (_, found) = parse(found);
    let mut text = String::new();
    for (expected, found) in expected.iter().zip(&found) {
        if expected.output == found.output {
            continue;
        }
        text.push_str(&format!("{CASE}{}\n", found.name));
        let (old, new): (Vec<&str>, Vec<&str>) = (expected.output.lines().collect(), found.output.lines().collect());
        let same_before = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
        let shorter = old.len().min(new.len()) - same_before;
        let pairs = old.iter().rev().zip(new.iter().rev());
        let same_after = pairs.take(shorter).take_while(|(old, new)| old == new).count();
        old[..same_before].iter().for_each(|line| text.push_str(&format!("  {line}\n")));
        old[same_before..old.len() - same_after].iter().for_each(|line| text.push_str(&format!("- {line}\n")));
        new[same_before..new.len() - same_after].iter().for_each(|line| text.push_str(&format!("+ {line}\n")));
        new[new.len() - same_after..].iter().for_each(|line| text.push_str(&format!("  {line}\n")));
    }
    text
}
