//! The pages that are made from the directive tables: they say what the program does, or these tests fail.
//! `GALE_GOLDEN=write` writes them anew.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use support::Directory;

/// What this program has for tests alone is in none of the pages.
const OF_TESTS: &str = "test_";

fn directives(words: &[&str]) -> String {
    let output = support::binary(false).arg("directives").args(words).output().expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn workspace(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Compares a file with what it should be, or writes it.
fn settle(path: &Path, expected: &str) {
    if std::env::var_os("GALE_GOLDEN").is_some_and(|value| value == "write") {
        fs::create_dir_all(path.parent().expect("a file")).expect("a directory");
        fs::write(path, expected).expect("written");
    }
    let found = fs::read_to_string(path).unwrap_or_default();
    let differing = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    assert!(found == expected, "{} is out of date: GALE_GOLDEN=write writes it; {differing:?}", path.display());
}

#[test]
fn the_reference_is_that_of_the_program() {
    let directory = Directory::new();
    directives(&["--pages", directory.path().to_str().expect("text")]);
    let mut pages: BTreeMap<String, String> = BTreeMap::new();
    for entry in fs::read_dir(directory.path()).expect("it was made") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a file").to_str().expect("text").to_owned();
        if !name.contains(OF_TESTS) {
            let text = fs::read_to_string(&path).expect("a page");
            let of_tests = format!("| [`{OF_TESTS}");
            pages.insert(name, text.lines().filter(|line| !line.starts_with(&of_tests)).map(with_end).collect());
        }
    }
    let folder = workspace("docs/reference");
    for (name, text) in &pages {
        settle(&folder.join(name), text);
    }
    for entry in fs::read_dir(&folder).expect("a folder") {
        let name = entry.expect("an entry").file_name().into_string().expect("text");
        assert!(pages.contains_key(&name), "docs/reference/{name} is of no module");
    }
}

#[test]
fn links_of_the_reference_lead_somewhere() {
    let folder = workspace("docs/reference");
    let mut links = 0;
    for entry in fs::read_dir(&folder).expect("a folder") {
        let text = fs::read_to_string(entry.expect("an entry").path()).expect("a page");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.starts_with("https://") {
                continue;
            }
            let (page, anchor) = link.split_once('#').unwrap_or((link, ""));
            let page = fs::read_to_string(folder.join(page)).unwrap_or_else(|error| panic!("{link}: {error}"));
            assert!(anchor.is_empty() || anchors(&page).any(|known| known == anchor), "{link} leads nowhere");
            links += 1;
        }
    }
    assert!(links > 500, "{links}");
}

/// What the headings of a page are called in links.
fn anchors(page: &str) -> impl Iterator<Item = String> {
    page.lines().filter(|line| line.starts_with('#')).map(|line| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | ' '));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

#[test]
fn the_manual_page_is_that_of_the_program() {
    let (mut page, mut is_of_tests) = (String::new(), false);
    for line in directives(&["--man"]).lines() {
        if line.starts_with(".Ss") || line.starts_with(".Sh") {
            is_of_tests = line.contains(OF_TESTS);
        }
        if !is_of_tests {
            page.push_str(&with_end(line));
        }
    }
    settle(&workspace("packaging/gale.conf.5"), &page);
}

fn with_end(line: &str) -> String {
    format!("{line}\n")
}
