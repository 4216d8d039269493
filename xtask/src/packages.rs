//! Dependencies of Gale: `Cargo.lock`, and cargo's metadata. Cargo runs offline and reports the packages of one target,
//! which an earlier build has fetched.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

/// The permitted registry, as written in `Cargo.lock`.
pub const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Returns the top folder of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the repository").to_owned()
}

/// A package in a `Cargo.lock`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct Locked {
    pub name: String,
    pub version: String,
    /// Its registry; `None` for packages of the workspace.
    pub source: Option<String>,
    pub checksum: Option<String>,
}

/// Reads the packages of this `Cargo.lock`.
pub fn read_lock(path: &Path) -> Result<Vec<Locked>, String> {
    #[derive(Deserialize)]
    struct Lock {
        package: Vec<Locked>,
    }
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lock: Lock = toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(lock.package)
}

/// Cargo's metadata: the packages of a target and their dependency graph.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    pub packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
pub struct Package {
    pub id: String,
    pub name: String,
    pub version: String,
    /// An SPDX expression.
    pub license: Option<String>,
    pub repository: Option<String>,
    pub source: Option<String>,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
struct Edge {
    pkg: String,
    dep_kinds: Vec<EdgeKind>,
}

#[derive(Debug, Deserialize)]
struct EdgeKind {
    /// `dev`, `build`, or `None` for linked code.
    kind: Option<String>,
}

/// Use of a package by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Only for building the program: build scripts, macros, and their dependencies.
    OfBuild,
    /// Linked into the program.
    OfProgram,
}

impl Metadata {
    /// Runs `cargo metadata` offline.
    pub fn read(target: &str) -> Result<Metadata, String> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", target]);
        let output = command.current_dir(root()).output().map_err(|error| format!("cargo metadata: {error}"))?;
        if !output.status.success() {
            return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim_end()));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))
    }

    /// Returns the transitive dependencies of a package and the package itself, with their use. Development
    /// dependencies are excluded.
    pub fn parts_of(&self, name: &str) -> HashMap<&str, Part> {
        let nodes: HashMap<&str, &Node> = self.resolve.nodes.iter().map(|node| (&*node.id, node)).collect();
        let packages: HashMap<&str, &Package> = self.packages.iter().map(|package| (&*package.id, package)).collect();
        let mut parts: HashMap<&str, Part> = HashMap::new();
        let mut rest: Vec<(&str, Part)> = self
            .packages
            .iter()
            .filter(|package| package.name == name && package.source.is_none())
            .map(|package| (&*package.id, Part::OfProgram))
            .collect();
        while let Some((id, part)) = rest.pop() {
            let is_macro = packages.get(id).is_some_and(|package| package.is_macro());
            let part = if is_macro { Part::OfBuild } else { part };
            if parts.get(id).is_some_and(|known| *known >= part) {
                continue;
            }
            parts.insert(id, part);
            let Some(node) = nodes.get(id) else { continue };
            for edge in &node.deps {
                let kinds = edge.dep_kinds.iter().filter_map(|kind| match kind.kind.as_deref() {
                    None => Some(part),
                    Some("build") => Some(Part::OfBuild),
                    Some(_) => None,
                });
                rest.extend(kinds.max().map(|part| (&*edge.pkg, part)));
            }
        }
        parts
    }

    /// Returns the direct dependencies of a package, without development dependencies.
    pub fn needs(&self, id: &str) -> Vec<&str> {
        let node = self.resolve.nodes.iter().find(|node| node.id == id);
        let is_needed = |edge: &&Edge| edge.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"));
        node.map(|node| node.deps.iter().filter(is_needed).map(|edge| &*edge.pkg).collect()).unwrap_or_default()
    }
}

impl Package {
    fn is_macro(&self) -> bool {
        self.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "proc-macro"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let text = r#"{
            "packages": [
                {"id": "p", "name": "program", "version": "1.0.0", "targets": [{"kind": ["bin"]}]},
                {"id": "l", "name": "library", "version": "1.0.0", "source": "r", "targets": [{"kind": ["lib"]}]},
                {"id": "m", "name": "macros", "version": "1.0.0", "source": "r", "targets": [{"kind": ["proc-macro"]}]},
                {"id": "b", "name": "builder", "version": "1.0.0", "source": "r", "targets": [{"kind": ["lib"]}]},
                {"id": "t", "name": "tester", "version": "1.0.0", "source": "r", "targets": [{"kind": ["lib"]}]}
            ],
            "resolve": {"nodes": [
                {"id": "p", "deps": [
                    {"pkg": "m", "dep_kinds": [{"kind": null}]},
                    {"pkg": "t", "dep_kinds": [{"kind": "dev"}]},
                    {"pkg": "l", "dep_kinds": [{"kind": "dev"}, {"kind": null}]}
                ]},
                {"id": "m", "deps": [{"pkg": "l", "dep_kinds": [{"kind": null}]}]},
                {"id": "l", "deps": [{"pkg": "b", "dep_kinds": [{"kind": "build"}]}]},
                {"id": "b", "deps": []},
                {"id": "t", "deps": []}
            ]}
        }"#;
        serde_json::from_str(text).expect("what cargo says")
    }

    #[test]
    fn parts_of_a_program_are_its_linked_crates_and_its_build_crates() {
        let metadata = metadata();
        let mut parts: Vec<(&str, Part)> = metadata.parts_of("program").into_iter().collect();
        parts.sort_unstable();
        let [program, build] = [Part::OfProgram, Part::OfBuild];
        assert_eq!(parts, [("b", build), ("l", program), ("m", build), ("p", program)]);
        assert_eq!(metadata.needs("p"), ["m", "l"]);
    }
}
