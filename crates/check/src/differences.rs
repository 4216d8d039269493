//! Differences from nginx by directive, read from the table in `docs/configuration.md`, so that each difference is
//! written down in one place.

use std::collections::HashMap;

use gale_config::{Contexts, Statement};

const PAGE: &str = include_str!("../../../docs/configuration.md");

/// Prefixes of the protocols covered by a row whose names end with `and its likes`.
const LIKES: &[&str] = &["proxy_", "fastcgi_", "scgi_", "uwsgi_", "grpc_"];

const STREAM: Contexts = Contexts::STREAM.or(Contexts::STREAM_SERVER);

/// One difference of a directive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name of the directive.
    pub name: String,
    arguments: Vec<&'static str>,
    /// Contexts in which the difference applies.
    contexts: Contexts,
    /// Description, in Markdown.
    pub text: &'static str,
    /// Link to a page and heading with details, relative to the documentation's folder.
    pub more: Option<String>,
}

impl Difference {
    fn is_about(&self, statement: &Statement, context: Contexts) -> bool {
        let has = |wanted: &&str| statement.args.iter().any(|word| word.text == wanted.as_bytes());
        self.contexts.overlaps(context) && self.arguments.iter().all(has)
    }

    /// Arguments that a statement must have for the difference to apply.
    pub fn arguments(&self) -> &[&'static str] {
        &self.arguments
    }
}

/// All differences, by the name of the directive.
#[derive(Debug)]
pub struct Differences(HashMap<String, Vec<Difference>>);

impl Differences {
    /// Reads the table.
    pub fn read() -> Self {
        let mut by_name: HashMap<_, Vec<_>> = HashMap::new();
        for difference in rows() {
            by_name.entry(difference.name.clone()).or_default().push(difference);
        }
        Differences(by_name)
    }

    /// Returns the differences of a directive in these contexts, in the order of the table.
    pub fn about(&self, name: &str, contexts: Contexts) -> Vec<&Difference> {
        let mut rows: Vec<_> = self.0.get(name).into_iter().flatten().collect();
        rows.retain(|row| row.contexts.overlaps(contexts));
        // A row specific to these contexts replaces the rows for all contexts.
        if rows.iter().any(|row| row.contexts != Contexts::ANY && contexts.is_subset(row.contexts)) {
            rows.retain(|row| row.contexts != Contexts::ANY);
        }
        rows
    }

    /// Returns the most specific difference that applies to this statement.
    pub fn of(&self, name: &str, statement: &Statement, context: Contexts) -> Option<&Difference> {
        let rows = self.0.get(name)?.iter().filter(|row| row.is_about(statement, context));
        rows.max_by_key(|row| (row.arguments.len(), row.contexts != Contexts::ANY))
    }
}

/// Reads the rows of the table; a row with several names is returned once for each.
fn rows() -> Vec<Difference> {
    let table = PAGE.split("\n### By directive\n").nth(1).and_then(|rest| rest.split("\n### ").next()).unwrap_or("");
    table.lines().filter(|line| line.starts_with("| `")).flat_map(row).collect()
}

fn row(line: &'static str) -> Vec<Difference> {
    let cells: Vec<&'static str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
    let [names, text, rest @ ..] = &cells[..] else { return Vec::new() };
    let (names, remark) = names.split_once(" (").unwrap_or((names, ""));
    let contexts = match remark {
        "`stream`)" => STREAM,
        "in `upstream`)" => Contexts::UPSTREAM,
        _ => Contexts::ANY,
    };
    let link = rest.first().and_then(|cell| cell.split_once("](")?.1.split(')').next());
    // A link that is only a heading refers to the table's own page.
    let more = link.map(|link| if link.starts_with('#') { format!("configuration.md{link}") } else { link.to_owned() });
    let mut differences = Vec::new();
    // A row about a parameter (`status_zone` of `resolver`) does not describe a directive of that name.
    if names.contains("` of `") {
        return differences;
    }
    for name in names.split('`').skip(1).step_by(2) {
        let mut words = name.split_ascii_whitespace();
        let Some(name) = words.next() else { continue };
        let arguments: Vec<&'static str> = words.filter(|word| *word != "…").collect();
        let mut add = |name: String| {
            differences.push(Difference { name, arguments: arguments.clone(), contexts, text, more: more.clone() });
        };
        match name.strip_prefix("proxy_").filter(|_| names.ends_with("and its likes")) {
            Some(rest) => LIKES.iter().for_each(|prefix| add(format!("{prefix}{rest}"))),
            None => add(name.to_owned()),
        }
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statement(text: &str) -> Statement {
        let mut sources = gale_config::Sources::new();
        let mut files = gale_config::MemoryFiles::new();
        let parsed = gale_config::parse_text(&mut sources, &mut files, "test", text.into(), "/".as_ref());
        parsed.statements.into_iter().next().expect("a statement")
    }

    #[test]
    fn the_table_of_the_documentation_is_read() {
        let rows = rows();
        assert!(rows.len() > 100, "{}", rows.len());
        assert!(rows.iter().all(|row| !row.text.is_empty() && !row.name.contains(['(', '`', ' '])), "{rows:?}");
        assert!(rows.iter().any(|row| row.name == "scgi_pass") && rows.iter().any(|row| row.name == "grpc_store"));
    }

    #[test]
    fn every_difference_says_for_whom_it_is() {
        const WHOM: [&str; 5] = ["clients", "operators", "applications", "safety", "structure"];
        let (_, tables) = PAGE.split_once("\n## Differences from nginx\n").expect("the heading");
        let tables = tables.split("\n## ").next().unwrap_or_default();
        let rows: Vec<&str> =
            tables.lines().filter(|line| line.starts_with("| ") && !line.ends_with("| for |")).collect();
        assert!(rows.len() > 150, "{}", rows.len());
        for row in rows {
            let whom = row.trim_end_matches(" |").rsplit("| ").next().unwrap_or_default();
            let each = whom.split("; ").map(|part| part.split(':').next().unwrap_or_default());
            assert!(each.clone().all(|part| WHOM.contains(&part)), "{row}");
        }
    }

    #[test]
    fn a_difference_counts_where_it_is_about_the_statement() {
        let differences = Differences::read();
        let of = |text: &str, context| {
            let statement = statement(text);
            let name = statement.name.text.to_string();
            differences.of(&name, &statement, context).map(|difference| difference.text)
        };
        let plain = of("listen 80;", Contexts::SERVER).expect("listen differs");
        let proxied = of("listen 80 proxy_protocol;", Contexts::SERVER).expect("with a PROXY header, too");
        assert_ne!(plain, proxied);
        assert!(of("return 200;", Contexts::SERVER).expect("return differs").contains("304"));
        assert!(of("return x;", Contexts::STREAM_SERVER).expect("in stream").contains("60 seconds"));
        assert!(of("queue 10;", Contexts::UPSTREAM).is_some());
        assert_eq!(of("server_name a;", Contexts::SERVER).map(|text| text.is_empty()), Some(false));
        assert_eq!(of("worker_rlimit_sigpending 1;", Contexts::MAIN), None);
    }
}
