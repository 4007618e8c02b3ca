//! Checks that the files of a room have no cyclic dependencies.
//!
//! A file depends on the files that define the names that it uses. A use of a re-exported name is a dependency on the file that defines the
//! name, not on the file that re-exports it. Uses of parent modules are allowed, because Rust code defines the shared items of a folder in
//! its parent module.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use petgraph::{algo::tarjan_scc, graph::DiGraph};
use syn::{
    Attribute, Item, UseTree, Visibility,
    visit::{self, Visit},
};

/// Path of a module or of an item, without `crate`.
type Name = Vec<String>;

/// The names that a source file defines and uses.
#[derive(Default)]
struct Source {
    defined: BTreeSet<String>,
    /// The name that each `use` item binds (`*` for a glob), and its path as written.
    bound: Vec<(String, Name)>,
    /// Paths of used items, as written in code and in `use` items. Re-exports of items of child modules are left out.
    used: Vec<Name>,
}

impl Source {
    fn tree(&mut self, tree: &UseTree, prefix: &mut Name, is_public: bool) {
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.tree(&path.tree, prefix, is_public);
                prefix.pop();
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.tree(tree, prefix, is_public);
                }
            }
            UseTree::Glob(_) => self.bind("*".to_owned(), prefix.clone(), is_public),
            UseTree::Name(name) if name.ident == "self" => {
                let bound = prefix.last().cloned().unwrap_or_default();
                self.bind(bound, prefix.clone(), is_public);
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                let path = prefix.iter().cloned().chain([name.clone()]).collect();
                self.bind(name, path, is_public);
            }
            UseTree::Rename(name) => {
                let path = prefix.iter().cloned().chain([name.ident.to_string()]);
                self.bind(name.rename.to_string(), path.collect(), is_public);
            }
        }
    }

    fn bind(&mut self, name: String, path: Name, is_public: bool) {
        let is_outside = matches!(path[0].as_str(), "crate" | "super");
        if !is_public || is_outside {
            self.used.push(path.clone());
        }
        self.bound.push((name, path));
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .meta
                .require_list()
                .is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

impl<'a> Visit<'a> for Source {
    fn visit_item(&mut self, item: &'a Item) {
        let (name, attributes) = match item {
            Item::Const(item) => (Some(&item.ident), &item.attrs),
            Item::Enum(item) => (Some(&item.ident), &item.attrs),
            Item::Fn(item) => (Some(&item.sig.ident), &item.attrs),
            Item::Impl(item) => (None, &item.attrs),
            Item::Mod(item) => (None, &item.attrs),
            Item::Static(item) => (Some(&item.ident), &item.attrs),
            Item::Struct(item) => (Some(&item.ident), &item.attrs),
            Item::Trait(item) => (Some(&item.ident), &item.attrs),
            Item::Type(item) => (Some(&item.ident), &item.attrs),
            Item::Use(item) => {
                if !is_for_tests(&item.attrs) {
                    let is_public = !matches!(item.vis, Visibility::Inherited);
                    self.tree(&item.tree, &mut Vec::new(), is_public);
                }
                return;
            }
            _ => return visit::visit_item(self, item),
        };
        if is_for_tests(attributes) {
            return;
        }
        self.defined.extend(name.map(ToString::to_string));
        visit::visit_item(self, item);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let segments = path.segments.iter().map(|s| s.ident.to_string());
        let segments: Name = segments.collect();
        if segments.len() > 1 {
            self.used.push(segments);
        }
        visit::visit_path(self, path);
    }
}

struct Crate(BTreeMap<Name, Source>);

impl Crate {
    fn read(folder: &Path, module: &Name, into: &mut BTreeMap<Name, Source>) {
        for entry in fs::read_dir(folder).expect("src is readable") {
            let path = entry.expect("an entry").path();
            let stem = path.file_stem().and_then(|s| s.to_str());
            let stem = stem.expect("the name is text").to_owned();
            let mut inner = module.clone();
            match stem.as_str() {
                "tests" | "main" => continue,
                "mod" | "lib" => {}
                _ => inner.push(stem),
            }
            if path.is_dir() {
                Self::read(&path, &inner, into);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                let file = syn::parse_file(&text).expect("it is Rust");
                let mut source = Source::default();
                if !is_for_tests(&file.attrs) {
                    source.visit_file(&file);
                }
                into.insert(inner, source);
            }
        }
    }

    /// Converts a path in `module` to a path from the root of the crate. Returns `None` if the path starts with another crate or with a
    /// name that a `use` item binds.
    fn absolute(&self, module: &Name, path: &[String]) -> Option<Name> {
        let mut base = module.clone();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => (base, rest) = (Vec::new(), &rest[1..]),
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|s| s == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            first => {
                let child: Name = base.iter().cloned().chain([first.to_owned()]).collect();
                if !self.0.contains_key(&child) {
                    return None;
                }
            }
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// Returns the module that defines an item. Follows at most `depth` re-exports.
    fn defining(&self, path: &Name, depth: usize) -> Option<Name> {
        if self.0.contains_key(path) {
            return Some(path.clone());
        }
        let at = (1..path.len())
            .rev()
            .find(|&n| self.0.contains_key(&path[..n]))?;
        let (module, name) = (path[..at].to_vec(), &path[at]);
        let source = &self.0[&module];
        if source.defined.contains(name) || depth == 0 {
            return Some(module);
        }
        for (bound, path) in &source.bound {
            let Some(absolute) = self.absolute(&module, path) else {
                continue;
            };
            if bound == name && absolute != [&module[..], std::slice::from_ref(name)].concat() {
                return self.defining(&absolute, depth - 1);
            }
            let globbed = self.0.get(&absolute);
            if bound == "*" && globbed.is_some_and(|file| file.defined.contains(name)) {
                return Some(absolute);
            }
        }
        Some(module)
    }
}

#[test]
fn files_of_a_room_use_each_other_in_no_circle() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = BTreeMap::new();
    Crate::read(&src, &Vec::new(), &mut sources);
    let all = Crate(sources);
    let names: Vec<&Name> = all.0.keys().collect();
    let mut uses: DiGraph<String, ()> = DiGraph::new();
    let files: Vec<_> = names
        .iter()
        .map(|name| uses.add_node(name.join("/")))
        .collect();
    for (at, (module, source)) in all.0.iter().enumerate() {
        let paths = source.used.iter();
        let paths = paths.filter_map(|path| all.absolute(module, path));
        for used in paths.filter_map(|path| all.defining(&path, 12)) {
            let is_in_room = used.first() == module.first() && !module.is_empty();
            if is_in_room && !module.starts_with(&used) {
                let to = names.binary_search(&&used).expect("it is a file");
                uses.update_edge(files[at], files[to], ());
            }
        }
    }
    assert!(uses.edge_count() > 500, "found {} uses", uses.edge_count());
    let circles: Vec<String> = tarjan_scc(&uses)
        .into_iter()
        .filter(|files| files.len() > 1)
        .map(|files| {
            let files = files.into_iter().map(|file| uses[file].as_str());
            files.collect::<Vec<_>>().join(", ")
        })
        .collect();
    assert!(circles.is_empty(), "{}", circles.join("\n"));
}
